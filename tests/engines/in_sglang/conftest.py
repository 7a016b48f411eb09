"""Tests of the SGLang plugin, in an environment that has SGLang: `make test` makes it, .venv-sglang.

There is no wheel of SGLang's kernels for CPUs. Its engine runs without them: what it imports is stubbed, and its Triton
kernels are interpreted.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") is None:
    collect_ignore_glob = ["*.py"]
else:
    stubs = str(Path(__file__).parent / "stubs")
    sys.path.insert(0, stubs)
    paths = os.pathsep.join(filter(None, (stubs, os.environ.get("PYTHONPATH"))))
    os.environ.update(PYTHONPATH=paths, SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="session")
def artifact(embedded, tmp_path_factory) -> str:
    """A folder with the means of the embedded model."""
    from kvfold.calibration import calibrate
    from kvfold.text import default_text, tokenize

    model, tokenizer = embedded
    folder = tmp_path_factory.mktemp("artifact")
    calibrate(model, tokenize(default_text("calibration"), tokenizer, 512), 512).save(folder)
    return str(folder)
