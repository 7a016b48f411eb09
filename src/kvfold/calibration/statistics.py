"""Statistics of the queries, keys, values and outputs per layer. Their size does not grow with the text."""

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvfold.calibration.tap import Seen
from kvfold.files import write_whole
from kvfold.ops.dense import by_head, log_softmax, log_weights
from kvfold.ops.pages import Logits
from kvfold.rope import Rope

FIRST_TOKENS = 4  # attention sinks: their keys are unlike all others, so they are left out
PROMPT = 1024  # tokens of the first passage whose keys and values are kept
QUERIES = 128  # of the second half of a passage, evenly spread: what they read is weighed; those of the first are kept
NEAR = 64  # tokens before a query that it is likely to read raw


@dataclass
class Moments:
    """Sums over vectors, per KV head. The vectors of all query heads of a KV head go into its sums."""

    count: Tensor  # float64[kv_heads], of vectors; or the sum of their weights
    total: Tensor  # float64[kv_heads, d]
    outer: Tensor  # float64[kv_heads, d, d], sum of x xᵀ

    @classmethod
    def zeros(cls, kv_heads: int, d: int) -> Self:
        return cls(*(torch.zeros(kv_heads, *dims, dtype=torch.float64) for dims in ((), (d,), (d, d))))

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add vectors [tokens, heads, d], with `weights` [tokens, heads] or 1. Heads are a multiple of kv_heads. The
        sums move to the device of x."""
        weights = torch.ones_like(x[..., 0]) if weights is None else weights
        x, w = (
            states.double().unflatten(1, (len(self.total), -1)).transpose(0, 1).flatten(1, 2)
            for states in (x, weights.unsqueeze(-1))
        )  # [kv_heads, vectors, d or 1]
        self.count = self.count.to(x.device) + w.sum((1, 2))
        self.total = self.total.to(x.device) + (w * x).sum(1)
        self.outer = self.outer.to(x.device) + (w * x).mT @ x

    @property
    def mean(self) -> Tensor:
        """float64[kv_heads, d]"""
        return self.total / self.count[:, None]

    def second(self, centre: Tensor | None = None) -> Tensor:
        """E[(x − c)(x − c)ᵀ], float64[kv_heads, d, d]. c is `centre` [kv_heads, d], or 0."""
        uncentred = self.outer / self.count[:, None, None]
        if centre is None:
            return uncentred
        c = centre.to(uncentred)
        cross = self.mean.unsqueeze(-1) * c.unsqueeze(-2)
        return uncentred - cross - cross.mT + c.unsqueeze(-1) * c.unsqueeze(-2)


@dataclass
class LayerStatistics:
    """What is kept of one attention layer. Plain moments and samples leave out the first tokens of each passage.

    The second moment of `out` is (SV)ᵀ(SV) / N with S the causal softmax. S itself is never held.

    Moments of what is read are weighted by what errors cost (see `_costs`). The mean of values is their centre: a token
    loses in proportion to its distance from the centre. So centres lie near attention sinks, above all near the value
    of the first token, where a plain mean would cost most.
    """

    q: Moments
    k: Moments
    v: Moments
    out: Moments
    read_q: Moments
    read_k: Moments
    read_v: Moments
    prompt: tuple[Tensor, Tensor, Tensor]  # float32: q [q_heads, m, d], k and v [kv_heads, n, d] of the first passage
    samples: tuple[Tensor, Tensor]  # float32: k and v [m, kv_heads, d] of tokens spread evenly over the text
    first: Tensor  # float64[kv_heads, d]: what keys at position 0 are near, whatever their token
    output_costs: Tensor  # float64[kv_heads, d, d]: what errors of attention's outputs cost behind their projection
    logits: Logits

    @classmethod
    def begin(cls, first: Seen, samples: int, first_keys: Tensor, output_costs: Tensor | None = None) -> Self:
        """Empty moments, room for `samples` tokens, and the prompt from the first passage.

        `first_keys` [n, kv_heads, d] are keys at position 0. Their median is kept: a few tokens have other keys there.
        Without `output_costs`, all directions of outputs cost the same.
        """
        k, v = first.k[:PROMPT], first.v[:PROMPT]
        q = first.q[_asking(len(k)).to(first.q.device)]
        prompt = [states.transpose(0, 1).float().cpu().contiguous() for states in (q, k, v)]
        room = [torch.zeros(samples, *states.shape[1:]) for states in (first.k, first.v)]
        of_keys, of_values = (partial(Moments.zeros, *states.shape[1:]) for states in (first.k, first.v))
        return cls(
            q=of_keys(),
            k=of_keys(),
            v=of_values(),
            out=of_values(),
            read_q=of_keys(),
            read_k=of_keys(),
            read_v=of_values(),
            prompt=(prompt[0], prompt[1], prompt[2]),
            samples=(room[0], room[1]),
            first=first_keys.double().median(dim=0).values.cpu(),
            output_costs=torch.eye(v.shape[2], dtype=torch.float64).expand(v.shape[1], -1, -1).contiguous()
            if output_costs is None
            else output_costs.cpu(),
            logits=first.logits
            if first.logits.sinks is None
            else first.logits._replace(sinks=first.logits.sinks.cpu()),
        )

    def add(self, seen: Seen, sampled: Tensor, row: int) -> None:
        """Add one passage to the moments. Its tokens `sampled` (indices) go to the samples, from `row` on."""
        for name in ("q", "k", "v", "out"):
            self.moments[name].add(getattr(seen, name)[FIRST_TOKENS:])
        asking = _asking(len(seen.k)).to(seen.q.device)
        costs = _costs(seen, asking)
        for moments, states, weights in zip(
            (self.read_q, self.read_k, self.read_v), (seen.q[asking], seen.k, seen.v), costs, strict=True
        ):
            moments.add(states, weights)
        for kept, states in zip(self.samples, (seen.k, seen.v), strict=True):
            kept[row : row + len(sampled)] = states[sampled.to(states.device)].float().cpu()

    @property
    def moments(self) -> dict[str, Moments]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Moments)}

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
            moments.count, moments.total = moments.count.cpu(), moments.total.cpu()
            moments.outer = moments.outer.cpu()

    def tensors(self) -> dict[str, Tensor]:
        """Everything as tensors, by name."""
        named = {"scale": torch.tensor(self.logits.scale, dtype=torch.float64)}
        if self.logits.cap is not None:
            named["cap"] = torch.tensor(self.logits.cap, dtype=torch.float64)
        if self.logits.sinks is not None:
            named["sinks"] = self.logits.sinks
        for name, moments in self.moments.items():
            named |= {f"{name}.{sums}": tensor for sums, tensor in vars(moments).items()}
        named |= {"first": self.first, "output_costs": self.output_costs}
        named |= {f"prompt.{name}": states for name, states in zip("qkv", self.prompt, strict=True)}
        return named | {f"samples.{name}": states for name, states in zip("kv", self.samples, strict=True)}

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor]) -> Self:
        moments = {
            name: Moments(*(named[f"{name}.{sums}"] for sums in ("count", "total", "outer")))
            for name in ("q", "k", "v", "out", "read_q", "read_k", "read_v")
        }
        prompt = (named["prompt.q"], named["prompt.k"], named["prompt.v"])
        cap = float(named["cap"]) if "cap" in named else None
        logits = Logits(float(named["scale"]), cap, named.get("sinks"))
        samples = named["samples.k"], named["samples.v"]
        return cls(
            **moments,
            prompt=prompt,
            samples=samples,
            first=named["first"],
            output_costs=named["output_costs"],
            logits=logits,
        )


def _asking(n: int) -> Tensor:
    """Some tokens of the second half of n tokens."""
    return torch.arange(n // 2, n)[:: max(1, n // 2 // QUERIES)]


def _costs(seen: Seen, asking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What errors cost in the outputs of some queries: of logits, by query [asking, q_heads] and by key [tokens,
    kv_heads]; and of values [tokens, kv_heads].

    Let p be the weights of a query and o its output. An error e of value j moves o by p_j·e, an error ε of logit j by
    p_j·ε·(v_j − o) in first order. Tokens that are likely to be read raw cost nothing, and the first ones only by their
    values: their keys are unlike all others.
    """
    tokens = torch.arange(len(seen.k), device=asking.device)
    causal = tokens <= asking[:, None]
    packed = tokens <= asking[:, None] - min(NEAR, len(tokens) // 4)
    costs = []
    by_query = seen.q[asking].float().unflatten(1, (seen.k.shape[1], -1)).permute(1, 2, 0, 3)  # [kv_heads, group, …]
    for q, k, v, logits in zip(
        by_query, seen.k.float().unbind(1), seen.v.float().unbind(1), by_head(seen.logits, len(by_query)), strict=True
    ):
        p = log_weights(q, k, causal, logits).exp()[..., : len(tokens)]
        out = p @ v
        of_values = (p * packed).square()
        far = (v.square().sum(-1) - 2 * out @ v.mT + out.square().sum(-1, keepdim=True)).clamp_min(0)  # ‖v_j − o‖²
        of_logits = of_values * far * (tokens >= FIRST_TOKENS)
        costs.append((of_logits.sum(-1).mT, of_logits.sum((0, 1)), of_values.sum((0, 1))))
    by_query, by_key, by_value = zip(*costs, strict=True)
    return torch.cat(by_query, dim=1), torch.stack(by_key, dim=1), torch.stack(by_value, dim=1)


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
            "passages": str(self.passages),
        }
        write_whole(path.parent, {path.name: save(tensors, header)})

    @staticmethod
    def passages_in(path: Path) -> int:
        """The number of passages in a saved file. Reads only its header."""
        with safe_open(path, "pt") as file:
            return int(file.metadata()["passages"])

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
            return cls(layers, rope, header["source"], int(header["passages"]))
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"{path} holds no calibration statistics: {error}; it only keeps what an interrupted run has done, so "
                f"delete it to begin anew: `rm {shlex.quote(str(path))}`"
            ) from None
