"""The effect of quantized keys on attention, layer by layer. There is no open block, and values are not quantized."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.calibration.capture import collect
from kvfold.calibration.rope_probe import probe
from kvfold.engines.transformers import PackedCache
from kvfold.format.codec import Codec
from kvfold.ops.dense import by_head, divergence, log_weights
from kvfold.ops.pages import Logits
from kvfold.rope import Rope

TOP = 10
PAIRS = 256  # pairs of a query and a key, per layer
OFFSETS = 50  # relative positions at which the logits of a pair are compared
FAR = 1024  # the largest relative position


@dataclass(frozen=True)
class LayerRow:
    layer: int
    softmax_kl: float  # KL(p ‖ p̂) of attention weights, p̂ with quantized keys; mean over heads and queries
    top10: float  # share of the ten most attended tokens that stay among the ten
    logit_mae: float  # mean |error| of q·k before scaling, over relative positions in [−1024, 1024]


@torch.no_grad()
def diagnose(
    model: PreTrainedModel, tokens: Tensor, caches: Mapping[str, PackedCache], rope: Rope | None = None
) -> dict[str, list[LayerRow]]:
    """Rows per cache: what its quantized keys do to the attention of `tokens` (1-D, one passage).

    Only queries of the second half count.
    """
    if len(tokens) < 2 * TOP:
        raise ValueError(f"diagnosing attention takes at least {2 * TOP} tokens, not {len(tokens)}")
    rope = rope or probe(model)
    rows: dict[str, list[LayerRow]] = {name: [] for name in caches}
    for layer, (*states, _, logits) in collect(model, tokens).items():
        q, k = (vectors.to(model.device) for vectors in states)  # [q_heads, n, d], [kv_heads, n, d]
        queries = q.unflatten(0, (len(k), -1))  # [kv_heads, group, n, d]
        for name, cache in caches.items():
            decoded = _decoded(cache.codecs[layer][0], k, cache.page_size)
            kl, top = _weights(queries, k, decoded, logits)
            rows[name].append(LayerRow(layer, kl, top, _logit_error(queries, decoded - k, rope)))
    return rows


def _decoded(codec: Codec, k: Tensor, page_size: int) -> Tensor:
    """Keys [kv_heads, n, d] from position 0 on, quantized and decoded. A codec of whole pages quantizes only full
    pages."""
    tokens = k.transpose(0, 1)
    if not codec.layout.per_page:
        return codec.read_packed(tokens, torch.arange(len(tokens), device=k.device)).transpose(0, 1)
    whole = len(tokens) // page_size * page_size
    pages = codec.transform.forward(tokens[:whole]).unflatten(0, (-1, page_size)).unsqueeze(3)
    decoded = codec.transform.inverse(codec.dequantize(*codec.quantize(pages)).squeeze(3).flatten(0, 1))
    return torch.cat((decoded, tokens[whole:])).transpose(0, 1)


def _weights(queries: Tensor, k: Tensor, decoded: Tensor, logits: Logits) -> tuple[float, float]:
    """KL of the attention weights and overlap of the most attended tokens, for queries [kv_heads, group, n, d]."""
    n = k.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool, device=k.device).tril()[n // 2 :]
    kl, common = [], []
    heads = zip(queries[:, :, n // 2 :], k, decoded, by_head(logits, len(k)), strict=True)
    for head, original, rounded, own in heads:
        p, other = (log_weights(head, keys, causal, own) for keys in (original, rounded))
        kl.append(divergence(p, other).double().mean())  # weights of later tokens are zero
        best, others = (weights[..., :n].topk(TOP, dim=-1).indices for weights in (p, other))
        common.append((best.unsqueeze(-1) == others.unsqueeze(-2)).any(dim=-1).double().mean())
    return float(torch.stack(kl).mean()), float(torch.stack(common).mean())


def _logit_error(queries: Tensor, error: Tensor, rope: Rope) -> float:
    """Mean |qᵀ·R_Δ·(k̂ − k)| over pairs of a query and a key, and over relative positions Δ between them.

    Queries are [kv_heads, group, n, d]. The errors k̂ − k of keys are [kv_heads, n, d].
    """
    n = error.shape[1]
    generator = torch.Generator().manual_seed(0)
    at, of = torch.randint(n, (2, PAIRS), generator=generator).to(error.device)
    offsets = torch.linspace(-FAR, FAR, OFFSETS, dtype=torch.float64, device=error.device)
    turn = offsets - (of - at).unsqueeze(1)  # from the key's position to the offset, [PAIRS, OFFSETS]
    turned = rope.rotate(error[:, of].double().unsqueeze(2), turn)  # [kv_heads, PAIRS, OFFSETS, d]
    return float(torch.einsum("hgpd,hpod->hgpo", queries[:, :, at].double(), turned).abs().mean())
