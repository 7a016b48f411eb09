"""Text for calibration and evaluation: the user's files, or what comes with every Python: documentation and source."""

import re
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Half = Literal["calibration", "evaluation"]

MORE = "give fewer --tokens, or a longer --text FILE"
DOCUMENTATION, SOURCE = "Python documentation", "Python source"
# Modules of the standard library that every Python since 3.11 has as one file: 1.2 million characters.
MODULES = (
    "argparse", "ast", "configparser", "dataclasses", "difflib", "doctest", "enum", "fractions", "inspect",
    "ipaddress", "mailbox", "pickle", "pickletools", "random", "shutil", "statistics", "subprocess", "tarfile",
)  # fmt: skip


def default_text(half: Half) -> str:
    """Every second topic of Python's documentation. A paragraph that several topics quote stays in the first only."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = []
    for _, topic in sorted(topics.items()):
        new = []
        for paragraph in re.split(r"\n\s*\n", topic):
            if (key := paragraph.strip()) not in seen:
                seen.add(key)
                new.append(paragraph)
        if new:
            texts.append("\n\n".join(new))
    return "\n\n".join(texts[0 if half == "calibration" else 1 :: 2])


def source_text() -> str:
    """Source code of the standard library."""
    return "\n\n".join(_source(module) for module in MODULES)


def _source(module: str) -> str:
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, SourceFileLoader) else None
    if source is None:
        raise FileNotFoundError(f"this Python has no source of its module {module}: name a text with --haystack FILE")
    return source


def haystack_texts(paths: Sequence[Path]) -> dict[str, str]:
    """The user's files by name. Without a file, the two default texts: documentation and source code."""
    if not paths:
        return {DOCUMENTATION: default_text("evaluation"), SOURCE: source_text()}
    if len({path.name for path in paths}) < len(paths):
        raise ValueError("two texts of haystacks have the same file name: rename one")
    return {path.name: read_text(path, "evaluation") for path in paths}


def read_text(path: Path | None, half: Half) -> str:
    """The whole file of the user. Without a file, one half of the default text."""
    if path is None:
        return default_text(half)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read the text {path}: {error.strerror}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty")
    if "\0" in text:
        raise ValueError(f"{path} is not text: it holds NUL bytes; name a UTF-8 text file")
    return text


def draw(tokens: "Tensor", count: int, context: int, seed: int) -> "Tensor":
    """`count` of the tokens, in passages of `context` tokens from random places. Passages do not overlap."""
    import torch

    places = len(tokens) // context
    passages = -(-count // context)
    if places < passages:
        raise ValueError(f"the text has {len(tokens)} tokens, too few for {passages} passages of {context}: {MORE}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(places, generator=generator)[:passages]
    return torch.cat([tokens[place * context : (place + 1) * context] for place in chosen.tolist()])[:count]


def opening(tokenizer: "PreTrainedTokenizerBase") -> "Tensor":
    """What the tokenizer puts before every text: int64[1] with BOS, or int64[0]. Some models are lost without BOS."""
    import torch

    bos = tokenizer.bos_token_id
    return torch.tensor([bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else [], dtype=torch.int64)


def with_openings(tokens: "Tensor", context: int, tokenizer: "PreTrainedTokenizerBase") -> "Tensor":
    """`tokens` (1-D) whose passages of `context` tokens begin as the tokenizer begins a text: BOS takes the place of
    the first token of each passage."""
    opened = tokens.clone()
    for bos in opening(tokenizer):
        opened[::context] = bos
    return opened


def tokenize(text: str, tokenizer: "PreTrainedTokenizerBase", tokens: int | None) -> "Tensor":
    """The first `tokens` tokens as int64[tokens], or all of them. No special tokens are added."""
    import torch

    if tokens is None:
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    # A token has about four characters. So a generous head of the text is enough. The tokens at its cut are not kept.
    for part in (text[: 16 * tokens + 1024], text):
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= tokens:
            return torch.tensor(ids[:tokens])
    raise ValueError(f"the text has {len(ids)} tokens, fewer than the {tokens} asked for: {MORE}")
