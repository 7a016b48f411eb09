"""Attention of a step's queries over packed pages and open blocks."""
