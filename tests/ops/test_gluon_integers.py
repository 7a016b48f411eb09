"""What of the Gluon kernel for integers can be checked without a GPU: how words become operands, that programs fit."""

import numpy as np
import pytest

from kvfold.format.layout import affine_slot
from kvfold.ops.attend.gluon import integer_decode as kernel
from kvfold.ops.attend.gluon.decode_tiles import TILE
from kvfold.ops.attend.gluon.occupancy import meta_stages


def registers(asm: str, words: list[int], count: int) -> list[int]:
    """The `count` outputs of inline assembly of a few instructions for these inputs."""
    values = {f"${count + i}": word for i, word in enumerate(words)}
    for line in asm.strip("{}").replace("\n", "").split(";"):
        name, _, rest = line.strip().partition(" ")
        to, *operands = rest.split(", ")
        numbers = [values[each] if each in values else int(each, 0) for each in operands if name != ".reg"]
        match name, numbers:
            case "and.b32", [x, y]:
                values[to] = x & y
            case "xor.b32", [x, y]:
                values[to] = x ^ y
            case "shr.u32", [x, y]:
                values[to] = x >> y
            case "prmt.b32", [x, y, chosen]:
                source = (x | y << 32).to_bytes(8, "little")
                values[to] = int.from_bytes(bytes(source[chosen >> 4 * i & 7] for i in range(4)), "little")
            case _:
                assert name in ("", ".reg"), line
    return [values[f"${i}"] for i in range(count)]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_keys_are_unpacked_to_signed_bytes(bits: int) -> None:
    words = np.random.default_rng(0).integers(2**32, size=4, dtype=np.uint32)
    codes = 8 // bits
    operands = np.array(registers(kernel.unpack_bytes(bits), words.tolist(), 4 * codes), dtype="<u4").view(np.int8)
    stored = words.astype("<u4").view(np.uint8).reshape(4, 4)  # [token, byte]
    for code, operand in enumerate(operands.reshape(codes, 4, 4).astype(int)):
        expected = (stored >> code * bits & 2**bits - 1).astype(int)
        place = 1 << (code * bits & 3)  # as queries are divided by
        np.testing.assert_array_equal(operand, expected - 128 if bits == 8 else expected * place)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_are_unpacked_to_subnormal_halves(bits: int) -> None:
    """Of both bytes of a half, for two tokens: each code but the highest, then the whole byte."""
    words = np.random.default_rng(0).integers(2**32, size=1, dtype=np.uint32)
    codes = 8 // bits
    operands = np.array(registers(kernel.unpack_halves(bits), words.tolist(), 2 * codes), dtype="<u4").view(np.float16)
    stored = words.astype("<u4").view(np.uint8).reshape(2, 2)  # [token, byte]
    for byte, operand in enumerate(operands.reshape(2, codes, 2).astype(float) * 2.0**24):
        for code in range(codes - 1):
            expected = (stored[:, byte] >> code * bits & 2**bits - 1).astype(float)
            np.testing.assert_array_equal(operand[code], expected * 2 ** (code * bits))
        np.testing.assert_array_equal(operand[codes - 1], stored[:, byte])


@pytest.mark.parametrize("kib", [100, 164, 228])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("dims", "group"), [(64, 64), (64, 32), (128, 128), (128, 64), (256, 256), (256, 128)])
def test_programs_fit_in_shared_memory(dims: int, group: int, bits: int, kib: int) -> None:
    shared = 1024 * kib
    side = kernel.integer_words(affine_slot(dims, bits, group), 0, 0)
    tile = 2 * TILE * affine_slot(dims, bits, group).slot_bytes
    warps = kernel.room(side, side, shared)
    fitting = [n for n in (1, 2, 3, 4, 8) if n * (2 * tile + 1024) <= shared]
    assert warps == fitting[-1]
    others = 2 * side.per_token + side.segments
    taken = 4 * TILE * (2 * others + meta_stages(side.segments, others, shared) * side.segments) + 1024
    assert warps * taken <= shared < (warps + 1) * taken


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("dims", "segments"), [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2)])
def test_every_code_of_a_key_has_an_index(dims: int, segments: int, bits: int) -> None:
    """Lane t of 4 holds `words` words after one another, four to a register under each mask (see unpack_bytes).

    They are the words of a segment, or of both if a segment has fewer than four.
    """
    side = kernel.integer_words(affine_slot(dims, bits, dims // segments), 0, 0)
    parts = kernel.key_parts(side.per_token, segments)
    assert parts == (1 if (dims, segments, bits) == (64, 2, 2) else segments)
    count, words, codes = dims // parts, side.per_token // parts // 4, 8 // bits
    in_segment = dims // segments // codes  # bytes
    for index in range(count):
        byte, lane, rest = index & 3, index >> 2 & 3, index >> 4
        word, code = rest % words, rest // words
        segment, at = divmod(4 * (lane * words + word) + byte, in_segment)
        expected = segment * (dims // segments) + at + code * in_segment  # as packing.py orders codes
        bits_of = [bit for bit in range(count.bit_length() - 1) if index >> bit & 1]
        assert sum(kernel.key_coordinate(bit, words, codes, in_segment) for bit in bits_of) == expected
