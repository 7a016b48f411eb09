"""The bytes of a packed cache: codes, slots, pages, and which tokens are raw. docs/format.md describes them."""
