"""Attention of a step's queries over packed pages and 16-bit windows."""
