"""The RoPE of a model, measured on the model itself."""

import math
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.calibration.tap import Seen, tapped
from kvfold.geometry import UnsupportedModel
from kvfold.rope import Rope

PROBES = 64  # random tokens per position
RUNG = 4  # ratio of successive positions
STILL = 1e-12  # a coordinate that changes by less than this share of its energy does not turn


@torch.no_grad()
def probe(model: PreTrainedModel) -> Rope:
    """The RoPE of the first packed layer, from its keys for the same random tokens at several positions.

    Each token is a sequence of its own. In such a sequence the input of no layer depends on the position, so only RoPE
    changes the keys. A factor on cos and sin (YaRN) is in the keys at position 0 too, and cancels.
    """
    limit = _position_limit(model)
    positions = [RUNG**n for n in range(32) if RUNG**n < limit - 1] + [limit - 1]
    keys = [_first_keys(model, position) for position in (0, *positions)]
    start, head_dim = keys[0], keys[0].shape[-1]
    turning = torch.zeros(head_dim, dtype=torch.bool)
    for key in keys[1:]:
        turning |= (key - start).square().sum(0) > STILL * start.square().sum(0)
    if not turning.any():
        return Rope(head_dim, (), ())

    angles, misfits = zip(*(_turn(start[:, turning], key[:, turning]) for key in keys[1:]), strict=True)
    first, second = _pair(model, torch.stack(misfits).amax(0))  # a pair must fit at every position
    frequency = torch.zeros(len(first), dtype=torch.float64)
    for position, angle in zip(positions, angles, strict=True):  # earlier positions tell the whole turns
        turns = ((frequency * position - angle[first, second]) / math.tau).round()
        frequency = (angle[first, second] + math.tau * turns) / position
    names = turning.nonzero().flatten()  # back to coordinates of the head
    pairs = zip(names[first].tolist(), names[second].tolist(), strict=True)
    return Rope(head_dim, tuple(pairs), tuple(frequency.tolist()))


def _position_limit(model: PreTrainedModel) -> int:
    """The number of positions, from 0 on, that have the same frequencies."""
    config = model.get_decoder().config
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # longer sequences have other frequencies
        return rope["original_max_position_embeddings"]
    return config.max_position_embeddings


class _Enough(Exception):
    """Raised to leave the model after its first packed layer."""


def _first_keys(model: PreTrainedModel, position: int) -> Tensor:
    """float64[PROBES * kv_heads, d]: keys of the first packed layer for fixed random tokens at a position."""
    keys: list[Tensor] = []

    def keep(seen: Seen) -> None:
        keys.append(seen.k.flatten(0, 1).double().cpu())
        raise _Enough

    with suppress(_Enough), tapped(model, keep) as decoder:
        ids = torch.randint(decoder.config.vocab_size, (PROBES, 1), generator=torch.Generator().manual_seed(0))
        position_ids = torch.full((PROBES, 1), position, device=model.device)
        decoder(ids.to(model.device), position_ids=position_ids, use_cache=False)
    if not keys:
        raise UnsupportedModel(f"{type(model).__name__}: none of its packed layers called the attention function")
    return keys[0]


def _turn(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """float64[n, d] twice -> float64[d, d] twice. For any two coordinates i and j:

    - the angle that best turns (before_i, before_j) into (after_i, after_j),
    - the misfit: the share of a coordinate's energy that this rotation misses.

    A least-squares fit of a whole d × d matrix would need keys of full rank. Where keys hardly vary, it would magnify
    the rounding of bfloat16. Two coordinates have one unknown.
    """
    gram, cross = before.T @ before, before.T @ after
    cosine, sine = cross.diag()[:, None] + cross.diag(), cross - cross.T
    angle = torch.atan2(sine, cosine)
    cos, sin = angle.cos(), angle.sin()
    # |after_i − cos·before_i + sin·before_j|², multiplied out
    own, other, target = gram.diag()[:, None], gram.diag(), after.square().sum(0)[:, None]
    missed = target + cos**2 * own + sin**2 * other - 2 * cos * (cross.diag()[:, None] + sin * gram) + 2 * sin * cross.T
    misfit = missed / (own + target)
    return angle, torch.maximum(misfit, misfit.T)


def _pair(model: PreTrainedModel, misfit: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs that RoPE turns, i < j. The usual pairings are tried first. Else a coordinate is paired with the one
    that fits it best.

    The order matters in bfloat16 only. There, the coordinates of slow pairs with large biases may fit others too.
    """
    misfit = misfit.fill_diagonal_(torch.inf)
    n = len(misfit)
    i = torch.arange(n)
    # Rounding of keys, cos and sin. transformers computes cos and sin in float32.
    tolerance = (4 * max(torch.finfo(dtype).eps for dtype in (model.dtype, torch.float32))) ** 2
    for partner in ((i + n // 2) % n, (i ^ 1).clamp(max=n - 1), misfit.argmin(1)):
        if torch.equal(partner[partner], i) and misfit[i, partner].max() < tolerance:
            return i[i < partner], partner[i < partner]
    raise UnsupportedModel(
        f"{type(model).__name__}: its keys change with position in another way than by rotations of two coordinates, "
        f"or too little to tell in {model.dtype}"
    )
