"""The tables of supported models say what `model_configs` says, which `test_geometry` holds against the geometry."""

from pathlib import Path

import pytest
from model_configs import ENGINES, MODELS
from support_matrix import families, packed, refused, support

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("file", "expected"),
    [("README.md", families()), ("docs/models.md", packed()), ("docs/models.md", refused())],
    ids=["families", "packed", "refused"],
)
def test_the_tables_in_the_documents(file: str, expected: str):
    assert expected in (ROOT / file).read_text(), f"`python tests/support_matrix.py` prints the tables of {file}"


def test_no_other_row_is_in_the_document():
    """A model that leaves `model_configs` leaves the tables too."""
    rows = [line for line in (ROOT / "docs/models.md").read_text().splitlines() if line.startswith("|")]
    assert rows == [*packed().splitlines(), *refused().splitlines()]


def test_a_model_that_one_engine_refuses_is_refused_there_alone():
    model = MODELS["Qwen3-8B"]
    changed = type(model)(model.family, model.config, refused_by={"vLLM": "a reason"})
    assert [support([changed], engine) for engine in ENGINES] == ["yes", "no", "yes"]
    assert [support([changed, model], engine) for engine in ENGINES] == ["yes", "partly", "yes"]
    assert support([MODELS["Bamba-9B"]], "SGLang") == "–"
