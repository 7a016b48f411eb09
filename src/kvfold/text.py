"""Text for calibration and evaluation: the user's file, or CPython's documentation, which every machine has."""

import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Half = Literal["calibration", "evaluation"]


def default_text(half: Half) -> str:
    """Every second topic of Python's documentation. A paragraph that several topics quote stays in the first only."""
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
    return text


def draw(tokens: torch.Tensor, count: int, context: int, seed: int) -> torch.Tensor:
    """`count` of the tokens, in passages of `context` tokens from random places. Passages do not overlap."""
    places = len(tokens) // context
    passages = -(-count // context)
    if places < passages:
        raise ValueError(f"the text has {len(tokens)} tokens, too few for {passages} passages of {context}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(places, generator=generator)[:passages]
    return torch.cat([tokens[place * context : (place + 1) * context] for place in chosen.tolist()])[:count]


def opening(tokenizer: "PreTrainedTokenizerBase") -> torch.Tensor:
    """What the tokenizer puts before every text: int64[1] with BOS, or int64[0]. Some models are lost without BOS."""
    bos = tokenizer.bos_token_id
    return torch.tensor([bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else [], dtype=torch.int64)


def with_openings(tokens: torch.Tensor, context: int, tokenizer: "PreTrainedTokenizerBase") -> torch.Tensor:
    """`tokens` (1-D) whose passages of `context` tokens begin as the tokenizer begins a text: BOS takes the place of
    the first token of each passage."""
    opened = tokens.clone()
    for bos in opening(tokenizer):
        opened[::context] = bos
    return opened


def tokenize(text: str, tokenizer: "PreTrainedTokenizerBase", tokens: int | None) -> torch.Tensor:
    """The first `tokens` tokens as int64[tokens], or all of them. No special tokens are added."""
    if tokens is None:
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    # A token has about four characters. So a generous head of the text is enough. The tokens at its cut are not kept.
    for part in (text[: 16 * tokens + 1024], text):
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= tokens:
            return torch.tensor(ids[:tokens])
    raise ValueError(f"the text has {len(ids)} tokens, fewer than the {tokens} asked for")
