"""The PTX that turns packed codes into levels, run in NumPy, against what the codec decodes."""

import re

import numpy as np
import pytest
import torch

from kvfold.format.codec import Codec
from kvfold.format.layout import codebook_slot
from kvfold.ops.attend.gluon import level_lookup as levels
from kvfold.quantizers import lloyd_max

Registers = dict[str, np.ndarray]
TOKENS = 2


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """As the PTX manual defines it: each of 4 nibbles chooses a byte of b:a or, from 8 on, copies of its high bit."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    out = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> 4 * i) & 15
        byte = (both >> (nibble & 7).astype(np.uint64) * 8).astype(np.uint32) & 255
        out |= np.where(nibble & 8, (byte >> 7) * 255, byte).astype(np.uint32) << 8 * i
    return out


OPERATIONS = {
    "prmt.b32": prmt,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "not.b32": np.bitwise_not,
    "shr.u32": np.right_shift,
    "mul.lo.u32": np.multiply,
    "mul.hi.u32": lambda a, b: (a.astype(np.uint64) * b >> 32).astype(np.uint32),
    "mad.lo.u32": lambda a, b, c: a * b + c,
}


def run(program: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What a program with 8 outputs leaves in them."""
    registers: Registers = {f"${8 + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(inputs[0], int(name, 0))

    for line in program.splitlines()[1:-1]:
        operation, target, *sources = re.findall(r"[^\s,;]+", line)
        registers[target] = OPERATIONS[operation](*map(value, sources))
    return [registers[f"${i}"] for i in range(8)]


def decoded(words: np.ndarray, bits: int, dims: int, lanes: int) -> np.ndarray:
    """Codes uint32[TOKENS, words] -> levels float32[TOKENS, dims], as the lanes of the kernel decode them."""
    columns = dims // 32
    share = levels.share(columns, lanes)
    out = np.full((TOKENS, dims), np.nan, np.float32)
    for lane in range(lanes):
        u, column = lane // columns, lane % columns
        loaded = [words[:, w.first + column + u % w.width * columns] for w in levels.lane_words(bits, columns, lanes)]
        for i_lookup, lookup in enumerate(levels.lane_lookups(bits, columns, lanes)):
            inputs = [loaded[i][token : token + 1] for i in lookup.words for token in range(TOKENS)]
            inputs += [np.full(1, number, np.uint32) for number in (u, *lookup.constants) for _ in range(TOKENS)]
            outputs = run(lookup.program, inputs)
            for number, pair in enumerate(np.stack(outputs).view(np.float16).astype(np.float32)):
                for half in range(2):
                    # pairs of keys are two parts of one token, pairs of values two tokens
                    other, byte = number // 4, number % 4
                    token, high = (other, half) if lanes == levels.KEY_LANES else (half, other)
                    place = levels.coordinate.fn(i_lookup, byte, high, lane, columns, lanes, share)
                    assert np.isnan(out[token, place])
                    out[token, place] = pair[half]
    return out / levels.codebook(bits).scale


CASES = [(dims, levels.KEY_LANES) for dims in (32, 64, 128, 256)] + [
    (dims, levels.VALUE_LANES) for dims in (64, 128, 256)
]


@pytest.mark.parametrize(("dims", "lanes"), CASES)
@pytest.mark.parametrize("bits", range(1, levels.MAX_BITS + 1))
def test_lanes_decode_what_the_codec_decodes(bits, dims, lanes):
    codec = Codec(codebook_slot([(dims, bits)]))
    for seed in range(3):
        x = torch.randn(TOKENS, dims, generator=torch.Generator().manual_seed(seed))
        codes, meta = codec.quantize(x)
        expected = codec.dequantize(codes, torch.ones_like(meta)).numpy()
        out = decoded(codes.numpy().view(np.uint32), bits, dims, lanes)
        np.testing.assert_allclose(out, expected, rtol=2**-11, atol=0)


@pytest.mark.parametrize("lanes", [levels.KEY_LANES, levels.VALUE_LANES])
@pytest.mark.parametrize("bits", range(1, levels.MAX_BITS + 1))
def test_every_code_everywhere(bits, lanes):
    """Words of all kinds, so that every code meets every neighbour's bits."""
    words = np.random.default_rng(bits).integers(0, 2**32, (TOKENS, 4 * bits), np.uint32)
    packed = torch.from_numpy(words.view(np.uint8))
    expected = Codec(codebook_slot([(128, bits)])).dequantize(packed, torch.ones(TOKENS, 1, dtype=torch.float16))
    np.testing.assert_allclose(decoded(words, bits, 128, lanes), expected.numpy(), rtol=2**-11, atol=0)


@pytest.mark.parametrize("bits", range(1, levels.MAX_BITS + 1))
def test_tables_are_levels_rounded_once(bits):
    book = levels.codebook(bits)
    numbers = np.array(lloyd_max.levels(bits))
    if bits >= 4:
        np.testing.assert_array_equal(numbers, -numbers[::-1])
        numbers = -numbers[: len(numbers) // 2]
    table = np.array(book.halves, np.uint16).view(np.float16)
    np.testing.assert_array_equal(table, (book.scale * numbers).astype(np.float16))
