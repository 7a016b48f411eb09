"""Attention of a step's queries over packed pages and 16-bit windows."""

from kvfold.ops.attend.blocked import attend

__all__ = ["attend"]
