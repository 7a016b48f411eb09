"""The paged cache: page tables, rings for the open blocks, and the bytes."""

from kvfold.paged.cache import PagedCache

__all__ = ["PagedCache"]
