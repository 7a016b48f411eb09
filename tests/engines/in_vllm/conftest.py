"""vLLM has an environment of its own, which `make test` makes; elsewhere these tests are not seen."""

from importlib.util import find_spec

import pytest
from batch_invariance import batch_invariant

from kvfold.calibration import calibrate
from kvfold.text import default_text, tokenize

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def artifact(embedded, tmp_path_factory) -> str:
    """A folder with the means of the embedded model."""
    model, tokenizer = embedded
    folder = tmp_path_factory.mktemp("artifact")
    calibrate(model, tokenize(default_text("calibration"), tokenizer, 512), 512).save(folder)
    return str(folder)


@pytest.fixture
def _batch_invariant():
    """What is computed for a request does not depend on its batch: see batch_invariance.py."""
    from vllm_engine import one_query_at_a_time

    with batch_invariant({"_C::cpu_attention_with_kv_cache": one_query_at_a_time}):
        yield
