"""Invertible maps of the head dimension, applied before a vector is quantized."""

from kvfold.transforms.base import Transform
from kvfold.transforms.hadamard import Hadamard, default_order

__all__ = ["Hadamard", "Transform", "default_order"]
