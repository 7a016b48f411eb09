"""Evaluation: what a recipe costs in quality, against the 16-bit cache of the same model."""
