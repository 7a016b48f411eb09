"""The paged cache: page tables, shadow pages for the windows, and the bytes."""

from kvfold.paged.cache import PagedCache

__all__ = ["PagedCache"]
