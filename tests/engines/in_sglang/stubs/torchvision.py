"""Stands in for torchvision, whose wheels may need CUDA: SGLang and transformers import its names, and use none."""

import sys
from unittest.mock import MagicMock

__version__ = "0"
__path__: list[str] = []
for name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{name}"] = MagicMock()
io, transforms = sys.modules[f"{__name__}.io"], sys.modules[f"{__name__}.transforms"]
