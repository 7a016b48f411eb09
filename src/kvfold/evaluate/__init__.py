"""Evaluation: the quality of recipes, against the 16-bit cache of the same model."""
