"""Statistics of the queries, keys, values and outputs per layer. Their size does not grow with the text."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold.calibration.tap import Seen
from kvfold.files import write_whole
from kvfold.ops.dense import by_head, log_softmax
from kvfold.ops.pages import Logits
from kvfold.rope import Rope

FIRST_TOKENS = 4  # attention sinks: their keys are unlike all others, so they are left out
PROMPT = 1024  # tokens of the first passage whose keys and values are kept
QUERIES = 128  # of the second half of these tokens, evenly spread, whose queries are kept


@dataclass
class Moments:
    """Sums over vectors, per KV head. The vectors of all query heads of a KV head go into its sums."""

    count: int  # vectors per KV head
    total: Tensor  # float64[kv_heads, d]
    outer: Tensor  # float64[kv_heads, d, d], sum of x xᵀ

    @classmethod
    def zeros(cls, kv_heads: int, d: int) -> Self:
        return cls(0, torch.zeros(kv_heads, d, dtype=torch.float64), torch.zeros(kv_heads, d, d, dtype=torch.float64))

    def add(self, x: Tensor) -> None:
        """Add vectors [tokens, heads, d]. Heads are a multiple of kv_heads. The sums move to the device of x."""
        x = x.double().unflatten(1, (len(self.total), -1)).transpose(0, 1).flatten(1, 2)  # [kv_heads, vectors, d]
        self.count += x.shape[1]
        self.total = self.total.to(x.device) + x.sum(1)
        self.outer = self.outer.to(x.device) + x.mT @ x

    @property
    def mean(self) -> Tensor:
        """float64[kv_heads, d]"""
        return self.total / self.count

    def second(self, centre: Tensor | None = None) -> Tensor:
        """E[(x − c)(x − c)ᵀ], float64[kv_heads, d, d]. c is `centre` [kv_heads, d], or 0."""
        uncentred = self.outer / self.count
        if centre is None:
            return uncentred
        c = centre.to(uncentred)
        cross = self.mean.unsqueeze(-1) * c.unsqueeze(-2)
        return uncentred - cross - cross.mT + c.unsqueeze(-1) * c.unsqueeze(-2)


@dataclass
class LayerStatistics:
    """What is kept of one attention layer. Moments and samples leave out the first tokens of each passage.

    The second moment of `out` is (SV)ᵀ(SV) / N with S the causal softmax. S itself is never held.
    """

    q: Moments
    k: Moments
    v: Moments
    out: Moments
    prompt: tuple[Tensor, Tensor, Tensor]  # float32: q [q_heads, m, d], k and v [kv_heads, n, d] of the first passage
    samples: tuple[Tensor, Tensor]  # float32: k and v [m, kv_heads, d] of tokens spread evenly over the text
    logits: Logits

    @classmethod
    def begin(cls, first: Seen, samples: int) -> Self:
        """Empty moments, room for `samples` tokens, and the prompt from the first passage."""
        k, v = first.k[:PROMPT], first.v[:PROMPT]
        q = first.q[_asking(len(k)).to(first.q.device)]
        prompt = [states.transpose(0, 1).float().cpu().contiguous() for states in (q, k, v)]
        room = [torch.zeros(samples, *states.shape[1:]) for states in (first.k, first.v)]
        return cls(
            q=Moments.zeros(first.k.shape[1], first.q.shape[2]),
            k=Moments.zeros(*first.k.shape[1:]),
            v=Moments.zeros(*first.v.shape[1:]),
            out=Moments.zeros(*first.v.shape[1:]),
            prompt=(prompt[0], prompt[1], prompt[2]),
            samples=(room[0], room[1]),
            logits=first.logits
            if first.logits.sinks is None
            else first.logits._replace(sinks=first.logits.sinks.cpu()),
        )

    def add(self, seen: Seen, sampled: Tensor, row: int) -> None:
        """Add one passage to the moments. Its tokens `sampled` (indices) go to the samples, from `row` on."""
        for name, moments in self.moments.items():
            moments.add(getattr(seen, name)[FIRST_TOKENS:])
        for kept, states in zip(self.samples, (seen.k, seen.v), strict=True):
            kept[row : row + len(sampled)] = states[sampled.to(states.device)].float().cpu()

    @property
    def moments(self) -> dict[str, Moments]:
        return {"q": self.q, "k": self.k, "v": self.v, "out": self.out}

    @property
    def far(self) -> Tensor:
        """bool[m, n]: which tokens of the prompt are packed when its queries read them: neither the first ones nor the
        nearest, as many as a quarter of the prompt."""
        n = self.prompt[1].shape[1]
        tokens = torch.arange(n)
        return (tokens >= FIRST_TOKENS) & (tokens <= _asking(n)[:, None] - n // 4)

    def log_weights(self, decoded: Tensor | None = None) -> Tensor:
        """The logarithms of the attention weights of the prompt's queries: float32[kv_heads, group, m, n]. If the layer
        has learned sinks, they follow the tokens as one more column. With `decoded` keys [kv_heads, n, d], those that
        are far are read as decoded."""
        q, k, _ = self.prompt
        q, n = q.unflatten(0, (len(k), -1)), k.shape[1]
        products = q @ k.mT.unsqueeze(1)
        if decoded is not None:
            products = torch.where(self.far, q @ decoded.mT.unsqueeze(1), products)
        causal = torch.arange(n) <= _asking(n)[:, None]
        heads = zip(products, by_head(self.logits, len(k)), strict=True)
        return torch.stack([log_softmax(own, causal, logits) for own, logits in heads])

    def to_host(self) -> None:
        for moments in self.moments.values():
            moments.total, moments.outer = moments.total.cpu(), moments.outer.cpu()

    def tensors(self) -> dict[str, Tensor]:
        """Everything as tensors, by name."""
        named = {"scale": torch.tensor(self.logits.scale, dtype=torch.float64)}
        if self.logits.cap is not None:
            named["cap"] = torch.tensor(self.logits.cap, dtype=torch.float64)
        if self.logits.sinks is not None:
            named["sinks"] = self.logits.sinks
        for name, moments in self.moments.items():
            named |= {f"{name}.count": torch.tensor(moments.count)}
            named |= {f"{name}.total": moments.total, f"{name}.outer": moments.outer}
        named |= {f"prompt.{name}": states for name, states in zip("qkv", self.prompt, strict=True)}
        return named | {f"samples.{name}": states for name, states in zip("kv", self.samples, strict=True)}

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor]) -> Self:
        q, k, v, out = (
            Moments(int(named[f"{name}.count"]), named[f"{name}.total"], named[f"{name}.outer"])
            for name in ("q", "k", "v", "out")
        )
        prompt = (named["prompt.q"], named["prompt.k"], named["prompt.v"])
        cap = float(named["cap"]) if "cap" in named else None
        logits = Logits(float(named["scale"]), cap, named.get("sinks"))
        return cls(q, k, v, out, prompt, (named["samples.k"], named["samples.v"]), logits)


def _asking(n: int) -> Tensor:
    """The tokens of a prompt of n tokens whose queries are kept."""
    return torch.arange(n // 2, n)[:: max(1, n // 2 // QUERIES)]


@dataclass
class Statistics:
    layers: list[LayerStatistics]
    rope: Rope
    source: str = ""  # sha256 of the model's configuration, the tokens and the context
    passages: int = 0  # how many passages of the text were added

    def save(self, path: Path) -> None:
        """Write one safetensors file. An older file stays until the new one is complete."""
        tensors = {
            f"{i}.{name}": tensor for i, layer in enumerate(self.layers) for name, tensor in layer.tensors().items()
        }
        header = {
            "layers": str(len(self.layers)),
            "rope": TypeAdapter(Rope).dump_json(self.rope).decode(),
            "source": self.source,
            "windows": str(self.passages),  # the name in older checkpoints
        }
        write_whole(path.parent, {path.name: save(tensors, header)})

    @staticmethod
    def passages_in(path: Path) -> int:
        """The number of passages in a saved file. Reads only its header."""
        with safe_open(path, "pt") as file:
            return int(file.metadata()["windows"])

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                named: list[dict[str, Tensor]] = [{} for _ in range(int(header["layers"]))]
                for key in file.keys():  # noqa: SIM118, it is no dict
                    layer, _, name = key.partition(".")
                    named[int(layer)][name] = file.get_tensor(key)
            rope = TypeAdapter(Rope).validate_json(header["rope"])
            layers = [LayerStatistics.from_tensors(layer) for layer in named]
            return cls(layers, rope, header["source"], int(header["windows"]))
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"{path} holds no calibration statistics: {error}; it only keeps what an interrupted run has done, so "
                f"delete it to begin anew: `rm {shlex.quote(str(path))}`"
            ) from None
