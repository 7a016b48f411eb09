"""What `kvfold bench kernels` times: an op, with the shapes of a batch and a layer."""

import re
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.ops.pages import Logits

CASES = {  # the default per op
    "decode": ("32x8192", "32x16384", "8x16384", "1x32768", "1x131072"),
    "extend": ("1x32768+512",),
    "store": ("32x1", "1x8192"),
}
EXTENDED = 512  # new tokens of `extend`, unless a case says how many
DECODED = 16  # new tokens of `decode`, at most


@dataclass(frozen=True)
class Case:
    op: str
    batch: int
    context: int  # tokens per sequence, the new ones included
    new: int  # the last tokens of each sequence: they are stored, or are the queries
    page: int = 64
    head_dim: int = 128
    q_heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"{self}: the kernels take bfloat16 and float16")
        if min(self.batch, self.new, self.page, self.head_dim, self.q_heads, self.kv_heads) < 1:
            raise ValueError(f"{self}: all sizes are at least 1")
        if self.new > self.context or (self.op == "decode" and self.new > DECODED):
            raise ValueError(f"{self}: decode has 1 to {DECODED} new tokens, other ops at most as many as the context")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self}: query heads are no multiple of KV heads")

    @classmethod
    def parse(cls, op: str, text: str, **shape: Any) -> "Case":
        """`32x8192` is 32 sequences of 8192 tokens. `1x32768+512` is one of 32768 tokens and 512 new ones.

        Without +NEW, the last token is new in `decode`, the last 512 in `extend`, and all in `store`.
        """
        if op not in CASES:
            raise ValueError(f"unknown op {op!r}: there are {', '.join(CASES)}")
        match = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", text)
        if not match:
            raise ValueError(
                f"{text!r} is no case: write BATCHxCONTEXT or BATCHxCONTEXT+NEW, as 32x8192 or 1x32768+512"
            )
        batch, context, new = (int(number or 0) for number in match.groups())
        usual = {"decode": 1, "extend": EXTENDED, "store": context}[op]
        return cls(op, batch, context + new, usual if match[3] is None else new, **shape)

    @property
    def history(self) -> int:
        return self.context - self.new

    @property
    def logits(self) -> Logits:
        return Logits(self.head_dim**-0.5)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return (
            f"{self.op}, {self.batch} × {self.context} tokens of which {self.new} new, {self.q_heads} query and "
            f"{self.kv_heads} KV heads of {self.head_dim}, pages of {self.page}, {self.dtype}"
        )
