"""Invertible maps of the head dimension, applied before a vector is quantized."""

from kvfold.transforms.base import Rotation, Transform
from kvfold.transforms.hadamard import Hadamard, hadamard_matrix
from kvfold.transforms.matrix import Matrix, random_rotation

__all__ = [
    "Hadamard",
    "Matrix",
    "Rotation",
    "Transform",
    "hadamard_matrix",
    "random_rotation",
]
