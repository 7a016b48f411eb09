"""A model that is small enough to be run often, in every engine.

transformers is imported only by fixtures: SGLang's tests put a stub in place that it has to find.
"""

from pathlib import Path

import pytest
import torch

from kvfold.models import EMBEDDED, embedded_folder, load_model, load_tokenizer, save_model
from kvfold.recipes import parse
from kvfold.text import default_text, tokenize

LAYERS, VOCABULARY = 2, 2048
LEARNING = ("oscar-int2", "gtq-k3v3", "fold2")


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A folder with the first layers of the embedded model and the first tokens of its vocabulary."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("small")
    model = AutoModelForCausalLM.from_pretrained(embedded_folder(), num_hidden_layers=LAYERS)
    model.resize_token_embeddings(VOCABULARY)
    save_model(model, load_tokenizer(EMBEDDED), folder)
    return folder


@pytest.fixture(scope="session")
def small_model(small):
    """The same, loaded."""
    return load_model(str(small), dtype="float32", device="cpu")[0]


@pytest.fixture(scope="session")
def small_artifact(small_model, tmp_path_factory) -> str:
    """A folder with what recipes need of it."""
    from kvfold.calibration import calibrate

    tokens, folder = torch.tensor(known_words("calibration")[:512]), tmp_path_factory.mktemp("small-artifact")
    calibrate(small_model, tokens, 512, [parse(recipe) for recipe in LEARNING]).save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def words() -> list[int]:
    """Of a text, those tokens that it knows."""
    return known_words("evaluation")


def known_words(half) -> list[int]:
    tokens = tokenize(default_text(half), load_tokenizer(EMBEDDED), 16384)
    return tokens[tokens < VOCABULARY].tolist()
