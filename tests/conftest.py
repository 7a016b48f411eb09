import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU
    if importlib.util.find_spec("triton"):
        import interpreter

        interpreter.patch_language_once_per_launch()
        interpreter.turn_assertions_on()

from covering import pytest_addoption, pytest_collection_modifyitems  # noqa: F401 - hooks

from kvfold.models import EMBEDDED, load_model


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is 0xFF bytes, and NaN as numbers of 16 or 32 bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _untouched_memory(_poisoned_memory: None) -> None:
    """Fresh memory as the system gives it, so that only what is used is resident."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def embedded():
    """(model, tokenizer) of the embedded model, in float32 on the CPU."""
    return load_model(EMBEDDED, dtype="float32", device="cpu")
