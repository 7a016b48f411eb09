"""vLLM has an environment of its own, which `make test` makes; elsewhere these tests are not seen."""

from importlib.util import find_spec

import pytest

from kvfold.calibration import calibrate
from kvfold.ops.attend import blocked
from kvfold.ops.dispatch import Ops
from kvfold.recipes import parse
from kvfold.text import default_text, tokenize

LEARNING = ("oscar-int2", "gtq-k3v3")

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def words(embedded) -> list[int]:
    return tokenize(default_text("evaluation"), embedded[1], 4096).tolist()


@pytest.fixture(scope="session")
def artifact(embedded, tmp_path_factory) -> str:
    model, tokenizer = embedded
    tokens = tokenize(default_text("calibration"), tokenizer, 512)
    folder = tmp_path_factory.mktemp("artifact")
    calibrate(model, tokens, 512, [parse(recipe) for recipe in LEARNING]).save(folder)
    return str(folder)


@pytest.fixture
def _float64(monkeypatch):
    """Attention rounds the same way for any number of queries.

    In float32 its last bit depends on how many there are; where it decides how a later layer rounds, a code changes and
    with it what follows. With this, keys and values are the same where vLLM's own are, and so must be everything else.
    """
    flash = blocked._flash

    def doubled(q, k, v, mask, scale):
        return flash(q.double(), k.double(), v.double(), None if mask is None else mask.double(), scale)

    monkeypatch.setattr(blocked, "_flash", doubled)
    monkeypatch.setattr(Ops, "attend", lambda self, *arguments: self.extend.run(*arguments))  # single queries, too
