"""Decode attention in Gluon, for NVIDIA's GPUs since Ampere: kernels for integers, evenly spaced levels and codebooks."""
