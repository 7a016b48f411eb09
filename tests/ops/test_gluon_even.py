"""The Gluon kernel for evenly spaced levels, and all Gluon kernels with several queries per sequence: compiled for
several GPUs, and their PTX run by NumPy (see emulated_ptx.py)."""

import math
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
from compiled_even import CASES, KEYS, SEVERAL, Case, Compiled, compile_all
from emulated_ptx import Memory, Program
from torch import Tensor

from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, affine_slot, even_slot
from kvfold.format.open_block import raw_from
from kvfold.ops.attend.gluon import even_decode, even_layouts
from kvfold.ops.attend.gluon.decode_step import unsupported
from kvfold.ops.attend.gluon.decode_tiles import TILE
from kvfold.ops.attend.gluon.even_pages import even_sides
from kvfold.ops.attend.gluon.occupancy import tiles_at_once
from kvfold.ops.attend.gluon.open_block import raw_parts
from kvfold.ops.cards import card_of

REGISTERS = 65536  # of an SM
SPILLED = {SEVERAL[0]: 64}  # bytes per thread, at most: docs/gpus.md says why


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_all(tmp_path_factory.mktemp("even"))


class Layer(NamedTuple):
    """Random pages and rings of some sequences with two KV heads."""

    case: Case
    pool: Tensor
    table: Tensor
    lengths: tuple[int, ...]
    near: Tensor  # float32[kv_heads, d]: what keys at position 0 are near
    raw: Tensor  # float64[sides, sequences, kv_heads, tokens, d]
    ring: Tensor
    rings: Tensor

    @classmethod
    def random(cls, case: Case, lengths: tuple[int, ...], starts: tuple[int, ...]) -> "Layer":
        """Any bytes may lie in a page. Most scales of evenly spaced levels are moderate, one of eight is 0, for all 16
        bytes of 0. Other metadata are float16 numbers. A ring has NaN in all places but those of the raw tokens that
        queries from `starts` on read."""
        layout, (blocks, tokens) = case.layout, case.ring
        generator, per_sequence = torch.Generator().manual_seed(0), -(-max(lengths) // layout.page_size)
        pages = 1 + len(lengths) * per_sequence
        pool = torch.randint(0, 256, (pages, 2, layout.page_bytes), dtype=torch.uint8, generator=generator)
        meta = pool[..., layout.places(0)[0].meta :]
        if layout.key.even:
            meta.copy_(torch.randint(60, 120, meta.shape, generator=generator))
            meta[torch.rand(meta.shape, generator=generator) < 1 / 8] %= 16
        else:
            numbers = torch.rand(*meta.shape[:2], meta.shape[2] // 2, generator=generator).half()
            meta.copy_(numbers.view(torch.uint8))
        table = torch.randperm(pages, generator=generator)[1:].view(len(lengths), per_sequence).contiguous()
        dtype = torch.bfloat16 if case.raw == "bf16" else torch.float16
        raw = torch.randn(2, len(lengths), 2, max(lengths), case.dims, generator=generator).to(dtype)
        ring = torch.full((1 + len(lengths) * blocks, 2, case.block_numbers), math.nan, dtype=dtype)
        rings = torch.randperm(len(ring), generator=generator)[1:].view(len(lengths), blocks)
        for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            for token in range(max(raw_from(start, case.block), 0), length if case.block else 0):
                block, place = divmod(token % (blocks * tokens), tokens)
                for side, at in enumerate((place, tokens + place)):
                    numbers = slice(at * case.dims, (at + 1) * case.dims)
                    ring[rings[sequence, block], :, numbers] = raw[side, sequence, :, token]
        near = 3 * torch.randn(2, case.dims, generator=generator) if case.near else torch.zeros(2, case.dims)
        return cls(case, pool, table, lengths, near, raw.double(), ring, rings)

    def read(self, sequence: int, position: int) -> list[Tensor]:
        """Keys and values that a query reads, float64[tokens, kv_heads, d]."""
        layout, border = self.case.layout, raw_from(position, self.case.block)
        tokens = torch.arange(border)
        page, offset = self.table[sequence, tokens // layout.page_size], tokens % layout.page_size
        slots = zip((layout.key, layout.value), layout.views(self.pool, False), self.raw, strict=True)
        k, v = (
            torch.cat((
                Codec(slot).dequantize(*views.read(page, offset))[:, :, 0].double(),
                raw[sequence, :, border : position + 1].transpose(0, 1),
            ))
            for slot, views, raw in slots
        )  # fmt: skip
        if border > 0:
            k[0] += self.near
        return [k, v]


def expected(layer: Layer, q: Tensor, counts: tuple[int, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [tokens, q_heads, d]: outputs, and the log2 of sums of weights. The queries of a sequence,
    `counts` of them, are its last tokens. Without tokens they are padding."""
    outs, sums = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    token = 0
    for sequence, (length, count) in enumerate(zip(layer.lengths, counts, strict=True)):
        for position in range(length - count, length):
            k, v = layer.read(sequence, max(position, 0))
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                logits = scale * (k[:, kv_head] @ q[token, head].double())
                outs[token, head] = torch.softmax(logits, dim=0) @ v[:, kv_head]
                sums[token, head] = torch.logsumexp(logits, dim=0) / math.log(2)
            token += 1
    return outs, sums


@pytest.mark.parametrize("number", range(len(CASES + SEVERAL)), ids=map(str, CASES + SEVERAL))
def test_the_kernel_computes_attention(number: int, kernels: list[Compiled]) -> None:
    """Sequences may have fewer queries than the most, or none, as padding has. A row of q belongs to no sequence. The
    queries of the first sequence lie on both sides of a border, of tiles and of blocks. The first query of the last
    sequence is padding: its block is in no ring. So is the query of a sequence without tokens."""
    case, kernel, splits = (CASES + SEVERAL)[number], kernels[number], 2 + number % 3
    several, block = case.queries > 1, case.block
    if several:
        lengths, counts, padding = (129, 0, 66 + block), (case.queries, 0, case.queries - 1), (0, 0, bool(block))
    else:
        lengths = (210, 129, 0, *([1, block - 1, block, block + 1] if block else []))
        counts, padding = (1,) * len(lengths), tuple(length == 0 for length in lengths)
    starts = [length - count + padded for length, count, padded in zip(lengths, counts, padding, strict=True)]
    layer = Layer.random(case, lengths, tuple(starts))
    rows = sum(counts) + several
    q = torch.randn(rows, 2 * case.ratio, case.dims, generator=torch.Generator().manual_seed(1))
    scale = q.shape[-1] ** -0.5
    parts = splits + min(splits, raw_parts(block))
    outs, weights = np.full((parts, *q.shape), np.nan, np.float32), np.full((parts, *q.shape[:2]), np.nan, np.float32)
    memory = Memory()
    arrays = (q.numpy(), outs, weights, layer.pool.numpy(), layer.table.numpy(), np.array(lengths, np.int32))
    pointers = [memory.add(array) for array in arrays]
    numbers = [q[0].numel(), *[layer.table.shape[1]] * 2]
    groups = -(-case.queries // case.shape["QUERIES"])
    if several:
        numbers += memory.add(np.cumsum([0, *counts], dtype=np.int32)), rows, groups
    if block:
        rings = [memory.add(tensor.numpy()) for tensor in (layer.ring.view(torch.int16), layer.rings)]
        numbers += *rings, *[case.ring[0]] * 2
    if several and block:
        numbers += [memory.add(np.array(starts, np.int32))]
    if case.near:
        numbers += [memory.add(layer.near.numpy())]
    arguments = *pointers, scale * math.log2(math.e), *numbers
    Program(kernel.ptx).launch((splits * groups, 2, len(lengths)), memory, kernel.shared, *arguments)

    assert np.isnan(weights[:, sum(counts) :]).all()
    assert np.isnan(outs[:, sum(counts) :]).all()
    first = np.cumsum([0, *counts])
    real = [row for begin, count, padded in zip(first, counts, padding, strict=False)
            for row in range(begin + padded, begin + count)]  # fmt: skip
    exact, sums = (x[real] for x in expected(layer, q, counts, scale))
    read = torch.from_numpy(weights)[:, real].double() * math.log(2)
    means = torch.from_numpy(outs)[:, real].double().nan_to_num()
    merged = (means * torch.softmax(read, dim=0).unsqueeze(-1)).sum(dim=0)
    found = torch.logsumexp(read, dim=0) / math.log(2)
    largest = max(layer.read(s, n - 1)[0].norm(dim=-1).max() for s, n in enumerate(lengths) if n)
    logits = q.norm(dim=-1).max() * scale * largest
    # queries are rounded to 16 bits, and weights to 11; of codebooks, queries and levels are too
    assert (found - sums).abs().max() < (2**-11 if case.rule == "codebook" else 2**-14) * logits
    assert (merged - exact).norm() < (2**-10 if case.rule == "codebook" else 2**-11) * exact.norm()


@pytest.mark.parametrize("number", range(len(CASES + SEVERAL)), ids=map(str, CASES + SEVERAL))
def test_as_many_ctas_fit_on_an_sm_as_are_launched(number: int, kernels: list[Compiled]) -> None:
    """And nothing is spilled, or little with several queries."""
    case, kernel = (CASES + SEVERAL)[number], kernels[number]
    card = card_of(case.capability)
    warps = case.kernel.warps
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [dump, "--dump-resource-usage", kernel.cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK", "LOCAL")}
    assert used["STACK"] + used["LOCAL"] <= SPILLED.get(case, 0)
    assert 32 * warps * used["REG"] <= REGISTERS
    taken = kernel.shared + 1024
    assert warps * taken <= card.shared
    if kernel.shared:  # else what is loaded goes to registers
        assert card.shared < (warps + 1) * taken


@pytest.mark.parametrize(("dims", "bits"), [(32, 1), (64, 1), (128, 1), (32, 2), (64, 2), (128, 2), (32, 4), (64, 8)])
def test_every_code_of_a_key_has_an_index(dims: int, bits: int) -> None:
    words = dims * bits // 32
    lanes, codes = even_layouts.sharing(words), even_layouts.codes_per_lane(bits, words)
    for index in range(dims):
        byte, lane, rest = index & 3, index >> 2 & 3, index >> 4
        own = max(1, words // 4)
        word, code = lane // lanes * own + rest % own, lane % lanes * codes + rest // own
        at = [bit for bit in range(dims.bit_length() - 1) if index >> bit & 1]
        found = sum(even_layouts.key_coordinate(bit, bits, words) for bit in at)
        assert found == 4 * word + byte + code * 4 * words  # as packing.py orders codes


@pytest.mark.parametrize(
    ("bits", "heads", "shared", "tiles"),
    [(2, 4, 228, 2), (2, 4, 164, 2), (2, 4, 100, 1), (2, 8, 228, 1), (3, 4, 228, 1), (4, 4, 228, 1)],
)
def test_two_tiles_are_read_at_once_where_as_many_ctas_fit(bits: int, heads: int, shared: int, tiles: int) -> None:
    layout, shared = Case(bits, heads, 64, (9, 0)).layout, 1024 * shared
    key, value = even_sides(layout)
    rows = 4 if key.segments + value.segments <= 4 else 8  # of scales
    bytes_per_token = layout.key.code_bytes + layout.value.code_bytes + rows
    assert tiles_at_once(bytes_per_token // 4, value.segments, heads, shared) == tiles
    assert even_decode.room(key, value, shared) * (2 * tiles * TILE * bytes_per_token + 1024) <= shared


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (KEYS[2], [(96, 2), (32, 4)], "values have a segment of 96 coordinates, not 32, 64, 128 or 256"),
        (KEYS[2], [(64, 4), (32, 4), (32, 4)], "values have 3 segments, not at most 2"),
        (KEYS[2], [(64, 1), (64, 2)], "values have 64 codes of 1 bits, which do not fill rows of 16 bytes"),
        (KEYS[2], [(96, 4), (32, 2)], "values have a segment of 96 coordinates, not 32, 64, 128 or 256"),
        ([(16, 4), (32, 2), (16, 1)], [(64, 2)], "keys have a segment of 16 coordinates, not 32, 64, 128 or 256"),
        ([(32, 1)] * 8, [(256, 2)], "keys have 8 segments, not at most 6"),
        ([(64, 4), (32, 2)], [(64, 2), (32, 4)], "keys have 96 coordinates, not 64, 128 or 256"),
        (KEYS[2], [(128, 4), (64, 2)], "values have 192 coordinates, not 64, 128 or 256"),
    ],
)
def test_what_else_is_read_by_triton_and_why(
    key: list[tuple[int, int]], value: list[tuple[int, int]], reason: str
) -> None:
    assert unsupported(PageLayout(even_slot(key), even_slot(value), 16), 4) == reason
    mixed = PageLayout(even_slot(KEYS[2]), affine_slot(128, 2), 16)
    assert unsupported(mixed, 4) == "values are not evenly spaced levels, as both sides must be"
