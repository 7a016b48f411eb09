"""Decode attention in Gluon, for NVIDIA's GPUs since Ampere: of integers, evenly spaced levels and codebooks."""
