"""The paged cache: page tables, 16-bit shadows of the windows, and the bytes."""

from kvfold.paged.cache import PagedCache

__all__ = ["PagedCache"]
