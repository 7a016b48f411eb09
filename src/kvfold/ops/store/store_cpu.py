"""`store` on a CPU, compiled by numba. It writes the same bytes as the definition."""

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from kvfold.ops.cpu import (
    AFFINE,
    CODEBOOK,
    EVEN,
    EXACT,
    PAGES,
    SEGMENT,
    SIDE,
    TASK,
    arguments,
    array,
    dense,
    described,
    f4,
    finite,
    i4,
    kernel,
    narrowed,
    rotate,
    segment_at,
    take,
    u1,
    widened,
)
from kvfold.ops.pages import LayerPages
from kvfold.quantizers import even, lloyd_max
from kvfold.quantizers.affine import SMALLEST_SCALE

STEPS = tuple(np.array(even.STEPS.get(bits, ()), np.float32) for bits in range(9))
TINY = np.finfo(np.float32).tiny
INTEGERS = f4(2**23)  # float32 numbers from 2^23 to 2^24 are integers: adding this rounds, half to even

Arguments = arguments(
    *PAGES, "levels", "boundaries",
    "key", "value", "key_mean", "value_mean", "first", "positions",
    "key_rotation", "key_rotations", "key_factors", "value_rotation", "value_rotations", "value_factors",
    "raw_keys", "raw_values", "rows", "locations", "kept", "ring", "ring_blocks", "ring_tokens", "ring_numbers",
    "faults", "tokens", "raw_tokens", "kv_heads", "key_dims", "value_dims", "page_size",
)  # fmt: skip


def store(pages: LayerPages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `naive.store`."""
    step, layout = pages.step, pages.layout
    locations, (tokens, kv_heads, key_dims), value_dims = step.locations.long().contiguous(), k.shape, v.shape[-1]
    key, value = k.float().contiguous(), v.float().contiguous()
    raw = pages.new_fresh() if pages.block else None
    rows = torch.arange(tokens) if raw is None or pages.fresh.rows is None else pages.fresh.rows
    kept = torch.full((tokens,), -1) if raw is None else pages.fresh.kept
    first = None if pages.key.first is None else pages.key.first.contiguous()
    positions = step.rows[1].contiguous()
    by_key, by_value = dense(pages.key.transform, key_dims), dense(pages.value.transform, value_dims)
    told = Arguments(
        0, 0, 0, *described(pages),
        lloyd_max.level_table(k.device).data_ptr(), lloyd_max.boundary_table(k.device).data_ptr(),
        key.data_ptr(), value.data_ptr(), by_key.mean.data_ptr(), by_value.mean.data_ptr(),
        0 if first is None else first.data_ptr(), positions.data_ptr(),
        by_key.matrix.data_ptr(), by_key.matrix.shape[0], by_key.factors.data_ptr(),
        by_value.matrix.data_ptr(), by_value.matrix.shape[0], by_value.factors.data_ptr(),
        *([side.data_ptr() for side in raw] if raw else (0, 0)), rows.data_ptr(), locations.data_ptr(), kept.data_ptr(),
        pages.ring.data_ptr(), pages.ring.shape[0], pages.ring_tokens, pages.ring.shape[2], pages.faults.data_ptr(),
        tokens, len(raw[0]) if raw else 0, kv_heads, key_dims, value_dims, layout.page_size,
    )  # fmt: skip
    _store(told, tokens * kv_heads)
    return raw


@njit(**EXACT)
def _square(x):
    """The squared length of x."""
    total = 0.0
    for j in range(len(x)):
        total += np.float64(x[j]) * np.float64(x[j])
    return total


@njit(**EXACT)
def _spread(x):
    """√(Σx⁴/Σx²)"""
    square = fourth = 0.0
    for j in range(len(x)):
        own = np.float64(x[j]) * np.float64(x[j])
        square += own
        fourth += own * own
    return f4(np.sqrt(fourth / max(square, np.float64(TINY))))


@njit(**EXACT)
def _norm(x):
    return f4(np.sqrt(_square(x)))


@njit(**EXACT)
def _affine(x, levels, clip, codes, meta):
    """See quantizers/affine.py."""
    low = high = x[0]
    for j in range(len(x)):
        low, high = min(low, x[j]), max(high, x[j])
    if clip:
        limit = f4(clip) * _spread(x)
        low = -limit if low < -limit else low
        high = limit if high > limit else high
    meta[0], meta[1] = narrowed((high - low) / f4(levels), True), narrowed(low, True)
    scale, offset = max(widened(meta[0], True), f4(SMALLEST_SCALE)), widened(meta[1], True)
    for j in range(len(x)):
        code = min(max((x[j] - offset) / scale, f4(0)), f4(levels))
        codes[j] = u1(i4(code + INTEGERS - INTEGERS))
    return finite(meta[0], True) and finite(meta[1], True)


@njit(**EXACT)
def _codebook(x, levels, boundaries, codes, meta):
    """See quantizers/codebook.py."""
    norm = _norm(x)
    scale = f4(1) / max(norm, TINY) * f4(np.sqrt(len(x)))
    for j in range(len(x)):
        codes[j] = np.searchsorted(boundaries, x[j] * scale)
        x[j] = levels[codes[j]]
    codes[len(x) :] = 0
    meta[0] = narrowed(norm / _norm(x), True)
    return finite(meta[0], True)


@njit(**EXACT)
def _largest(x):
    """The largest magnitude."""
    largest = f4(0)
    for j in range(len(x)):
        largest = max(largest, abs(x[j]))
    return largest


@njit(**EXACT)
def _nearest(x, step, bits, codes):
    """The codes of the levels nearest to x. Returns the product of x with these levels, and their square."""
    levels = f4((1 << bits) - 1)
    middle, step, product, square = levels / f4(2), max(step, TINY), 0.0, 0.0
    for j in range(len(x)):
        code = min(max(x[j] / step + middle, f4(0)), levels) + INTEGERS - INTEGERS
        codes[j] = u1(i4(code))
        product += np.float64(x[j]) * np.float64(code - middle)
        square += np.float64(code - middle) * np.float64(code - middle)
    return product, square


@njit(**EXACT)
def _even(x, bits, codes):
    """See quantizers/even.py. Returns the byte of the scale."""
    square = _square(x)
    size = _largest(x) if bits >= even.BY_LARGEST else f4(np.sqrt(square / len(x)))
    best, product, step = -1.0, 0.0, f4(0)
    for multiple in STEPS[bits]:
        tried = size * multiple
        with_levels, of_levels = _nearest(x, tried, bits, codes)
        if with_levels * with_levels / of_levels > best:
            best, product, step = with_levels * with_levels / of_levels, with_levels, tried
    if step != tried:
        _nearest(x, step, bits, codes)
    scale = f4(square / product if square > 0 else square)
    if not scale < np.inf:
        return even.UNSTORABLE
    word, drop = np.int64(scale.view(np.int32)), even.DROPPED
    nearest = ((word + (1 << drop - 1) - 1 + (word >> drop & 1)) >> drop) - even.LEAST
    stored = 0 if nearest < 1 << even.MANTISSA else min(nearest, even.UNSTORABLE)
    if bits >= even.FINE:
        rounded = i4((stored + even.LEAST) << drop).view(np.float32) if stored else f4(0)
        _nearest(x, rounded, bits, codes)
    return stored


@njit(**EXACT)
def _pack(codes, bits, packed):
    """See packing.py."""
    below = first = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            run = len(codes) * width // 8
            for j in range(run):
                byte = 0
                for part in range(8 // width):
                    byte |= (codes[part * run + j] >> below & ((1 << width) - 1)) << part * width
                packed[first + j] = u1(byte)
            first += run
            below += width


@njit(**EXACT)
def _narrow(x, half, words):
    """Round x to 16 bits. Returns whether all numbers are finite there."""
    all_finite = True
    for j in range(len(x)):
        words[j] = narrowed(x[j], half)
        all_finite &= finite(words[j], half)
    return all_finite


@njit(**EXACT)
def _slot(x, segments, clip, levels, boundaries, half, unpacked, pool, words, page, place):
    """Quantize x into the slot at offset `place` of the page, which begins at byte `page`. Returns whether x and the
    slot are finite. Overwrites x."""
    all_finite = True
    for j in range(len(x)):  # minima and maxima may miss NaN
        all_finite &= abs(x[j]) < np.inf
    for i in range(len(segments)):
        segment = segments[i]
        part, stored = x[segment.start : segment.start + segment.dims], unpacked[: segment.stored]
        byte, meta = segment_at(segment, page, place)
        entries, packed = words[meta // 2 :], pool[byte:]
        first = 1 << segment.bits  # where the levels of this width begin
        if segment.rule == AFFINE:
            all_finite &= _affine(part, first - 1, clip, stored, entries)
            _pack(stored, segment.bits, packed)
        elif segment.rule == CODEBOOK:
            all_finite &= _codebook(part, levels[first:], boundaries[first : 2 * first - 1], stored, entries)
            _pack(stored, segment.bits, packed)
        elif segment.rule == EVEN:
            scale = _even(part, segment.bits, stored)
            all_finite &= scale != even.UNSTORABLE
            pool[meta] = scale
            _pack(stored, segment.bits, packed)
        else:
            all_finite &= _narrow(part, half, packed[: 2 * segment.dims].view(np.uint16))
    return all_finite


@kernel(Arguments)
def _store(p):
    """A task transforms the key and the value of one token and KV head. It packs them into their slots, and writes them
    raw to `raw` and to the ring."""
    a = carray(p, 1)[0]
    sides, segments = array(a.sides, 2, SIDE), array(a.segments, (2, a.most), SEGMENT)
    levels, boundaries = array(a.levels, 512, np.float32), array(a.boundaries, 512, np.float32)
    locations, half = array(a.locations, a.tokens, np.int64), a.half != 0
    pool, words = array(a.pool, a.pool_bytes, np.uint8), array(a.pool, a.pool_bytes // 2, np.uint16)
    pages = a.pool_bytes // a.page_stride
    faults = array(a.faults, pages * a.page_size, np.uint8)
    first_keys, positions = array(a.first, (a.kv_heads, a.key_dims), np.float32), array(a.positions, a.tokens, np.int64)
    rows, kept = array(a.rows, a.tokens, np.int64), array(a.kept, a.tokens, np.int64)
    ring = array(a.ring, (a.ring_blocks, a.kv_heads, a.ring_numbers), np.uint16)
    most = max(a.key_dims, a.value_dims)
    unpacked, given, turned = np.empty(most + 7, np.uint8), np.empty(most, np.float32), np.empty(most, np.float32)
    task = take(p, TASK)
    while task < a.tasks:
        head, token = task % a.kv_heads, task // a.kv_heads
        location, at_ring = locations[token], kept[token]
        page, place = location // a.page_size, location % a.page_size
        for side in range(2):
            dims, at, mean = (a.value_dims, a.value, a.value_mean) if side else (a.key_dims, a.key, a.key_mean)
            raw = array(a.raw_values if side else a.raw_keys, (a.raw_tokens * a.kv_heads, dims), np.uint16)
            row = rows[token] * a.kv_heads + head
            if location < 0:  # padding
                if a.raw_tokens:
                    raw[row] = 0
                continue
            x, y = given[:dims], turned[:dims]
            x[:] = array(at, (a.tokens * a.kv_heads, dims), np.float32)[task]
            if mean:
                x -= array(mean, (a.kv_heads, dims), np.float32)[head]
            at, count = (a.value_rotation, a.value_rotations) if side else (a.key_rotation, a.key_rotations)
            rotations = array(at, (count, dims, dims), np.float64)
            factors = array(a.value_factors if side else a.key_factors, dims, np.float64)
            rotate(x, rotations, head, factors, y)
            held = _narrow(y, half, raw[row]) if a.raw_tokens else True
            if a.first and side == 0 and positions[token] == 0:
                y -= first_keys[head]
            s, of_head = sides[side], page * a.page_stride + head * a.head_stride
            own = segments[side, : s.segments]
            held &= _slot(y, own, s.clip, levels, boundaries, half, unpacked, pool, words, of_head, place)
            if not held:
                y[:], faults[location] = f4(0), 1
                _slot(y, own, s.clip, levels, boundaries, half, unpacked, pool, words, of_head, place)
                if a.raw_tokens:
                    raw[row] = 0
            if at_ring >= 0:
                first = side * a.ring_tokens * a.key_dims + at_ring % a.ring_tokens * dims
                ring[at_ring // a.ring_tokens, head, first : first + dims] = raw[row]
        task = take(p, TASK)
