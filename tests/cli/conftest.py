import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from commands import FITTED, HEAD_DIM, KV_HEADS, LAYERS, plain, run
from own_methods import forget_methods
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.cli import main
from kvfold.recipes import RECIPES


@pytest.fixture(autouse=True)
def _narrow_terminal_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def _own_method(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recipe of examples/own_method.py is known, as far as the test names it."""
    monkeypatch.setenv("KVFOLD_METHODS", str(Path(__file__).parents[2] / "examples" / "own_method.py"))
    before = dict(RECIPES)
    yield
    RECIPES.clear()
    RECIPES.update(before)
    forget_methods()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that runs in no time: random weights, and a token for each byte."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "User: {{ messages[0].content }} Answer:"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def means(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the small model."""
    folder = tmp_path_factory.mktemp("artifacts") / "means"
    run("calibrate", small, "--out", folder, "--tokens", 100, "--context", 64)
    return folder


@pytest.fixture(scope="session")
def fits(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the small model, with what two recipes learned."""
    folder = tmp_path_factory.mktemp("artifacts") / "fits"
    run("calibrate", small, "--out", folder, *FITTED, "--tokens", 200, "--context", 64)
    return folder


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail: nothing on standard output, one line on the error stream, which is returned.

    An empty line may stand before it, where a progress bar was."""

    def fail(*arguments: object) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["kvfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert (stop.value.code, captured.out) == (1, "")
        (line,) = filter(str.strip, plain(captured.err).splitlines())
        assert line.startswith("error: ")
        return line

    return fail
