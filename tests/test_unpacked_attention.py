"""Attention over keys and values that are not packed, against loops in float64."""

import math

import pytest
import torch
from packed_reads import packed_and_read

from kvfold.ops.pages import Logits
from kvfold.recipes import parse
from kvfold.unpacked_attention import attend_masked, attend_unpacked

SINKS = torch.tensor([0.5, -1.0, 2.0, 1.0])


class Attention(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def states(n: int, tokens: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four query heads of 16 coordinates, two KV heads, values of 8."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, 4, n, 16), (batch, 2, tokens, 16), (batch, 2, tokens, 8)
    q, k, v = (torch.randn(shape, generator=generator) + 0.5 for shape in shapes)
    return q, k, v


def attended(q, k, v, reads, scale, cap=None, sinks=None):
    """One query's output: over the tokens in `reads`, with keys k[j] and values v[j]. A sink has no value."""
    x = {j: scale * float(q.double() @ k[j].double()) for j in reads}
    x = {j: cap * math.tanh(logit / cap) if cap else logit for j, logit in x.items()}
    total = sum(map(math.exp, x.values())) + (0 if sinks is None else math.exp(sinks))
    return sum(math.exp(logit) / total * v[j].double() for j, logit in x.items())


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("mask", ["causal", "sliding", "additive"])
def test_soft_caps_sinks_and_masks(cap, sinks, mask):
    q, k, v = states(5, 9)
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4)
    if mask == "sliding":
        seen = seen.triu(2)
    given = {
        "causal": None if (cap, sinks) != (None, None) else seen,  # SDPA takes its causal mask as it is
        "sliding": seen.expand(2, 1, -1, -1),
        "additive": torch.zeros(2, 1, 5, 9).masked_fill(~seen, -torch.inf),
    }[mask]
    out = attend_unpacked(Attention(), q, k, v, given, scaling=0.3, softcap=cap, s_aux=sinks)
    assert out.shape == (2, 5, 4, 8)
    for row in range(2):
        for head in range(4):
            for t in range(5):
                own = k[row, head // 2], v[row, head // 2], seen[t].nonzero().flatten().tolist()
                sink = None if sinks is None else float(sinks[head])
                expected = attended(q[row, head, t], *own, 0.3, cap, sink)
                assert torch.allclose(out[row, t, head].double(), expected, atol=1e-5)


def test_queries_that_read_nothing_stay_finite():
    """Padding: what it becomes means nothing, but later layers multiply it by zero."""
    q, k, v = states(4, 4)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    mask[0, :, :, :2] = False
    assert attend_unpacked(Attention(), q, k, v, mask, softcap=2.0).isfinite().all()


@pytest.mark.parametrize("logits", [Logits(0.3), Logits(0.3, 2.0, SINKS)])
@pytest.mark.parametrize("block", [0, 3])
def test_tokens_of_an_image_see_each_other(logits, block):
    """Tokens 4 to 7 are an image; the second row has two tokens of padding before it."""
    q, k, v = states(10, 10)
    mask = torch.ones(10, 10, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[:, :, 4:8, 4:8] = True
    mask[1, :, :, :2] = False
    fit = {"key_mean": k.mean(dim=(0, 2)), "value_mean": v.mean(dim=(0, 2)), "key_first": 1.2 * k[0, :, 0]}
    position = torch.stack([torch.arange(10), torch.arange(10) - 2])
    codecs = parse("int4").codecs(16, 8, fit)
    out = attend_masked(q, k, v, mask, logits, codecs, block, torch.bfloat16)
    read = []
    for codec, x in zip(codecs, (k, v), strict=True):
        tokens = x.permute(0, 2, 1, 3)
        raw = codec.transform.inverse(codec.transform.forward(tokens).bfloat16().float())
        packed = codec.transform.inverse(packed_and_read(codec, tokens.flatten(0, 1), position.flatten()))
        packed = packed.unflatten(0, (2, 10))
        read.append((packed, raw))
    for row, padding in enumerate((0, 2)):
        for head in range(4):
            for t in range(padding, 10):
                reads = [j for j in range(padding, 10) if j <= t or (4 <= t < 8 and 4 <= j < 8)]
                opened = padding + (t - padding) // block * block if block else t + 1
                near = {j: j >= opened for j in reads}
                keys, values = (
                    {j: (raw if near[j] else packed)[row, j, head // 2] for j in reads} for packed, raw in read
                )
                sink = None if logits.sinks is None else float(logits.sinks[head])
                expected = attended(q[row, head, t], keys, values, reads, logits.scale, logits.cap, sink)
                assert torch.allclose(out[row, t, head].double(), expected, atol=1e-5)
