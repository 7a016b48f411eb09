import math

import pytest
import torch
from decoded_slots import PLANES
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.format.packing import pack, packed_bytes, planes, unpack

WIDTHS = sorted(PLANES)


def unit(bits: int) -> int:
    """The fewest codes of `bits` bits that fill whole bytes."""
    return 8 // math.gcd(8, bits)


def packed_by_hand(codes: list[int], bits: int) -> list[int]:
    """The format in Python integers: every plane after the other, byte j of a plane from codes j, j + n/per, …"""
    packed, below = [], 0
    for width in PLANES[bits]:
        per = 8 // width
        stride = len(codes) // per
        for j in range(stride):
            byte = 0
            for part in range(per):
                byte += (codes[j + part * stride] // 2**below % 2**width) * 2 ** (part * width)
            packed.append(byte)
        below += width
    return packed


def tensor(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


@st.composite
def code_batches(draw) -> tuple[int, torch.Tensor]:
    """(bits, uint8[leading shape, n] codes)."""
    bits = draw(st.sampled_from(WIDTHS))
    n = unit(bits) * draw(st.integers(1, 24))
    shape = (*draw(st.lists(st.integers(0, 3), max_size=3)), n)
    flat = draw(st.binary(min_size=math.prod(shape), max_size=math.prod(shape)))
    return bits, tensor([byte % 2**bits for byte in flat]).reshape(shape)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(code_batches())
def test_every_byte_is_as_documented_and_unpacks_to_the_codes(batch):
    bits, codes = batch
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*codes.shape[:-1], codes.shape[-1] * bits // 8)
    rows = codes.reshape(-1, codes.shape[-1]).tolist() if codes.numel() else []
    assert packed.reshape(len(rows), packed.shape[-1]).tolist() == [packed_by_hand(row, bits) for row in rows]
    unpacked = unpack(packed, bits)
    assert unpacked.dtype == torch.uint8
    assert unpacked.shape == codes.shape
    assert torch.equal(unpacked, codes)
    assert torch.equal(codes, before), "packing must not change its input"


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.sampled_from(WIDTHS), st.integers(1, 16), st.data())
def test_any_bytes_are_the_codes_they_unpack_to(bits, units, data):
    n_bytes = units * unit(bits) * bits // 8
    packed = tensor(list(data.draw(st.binary(min_size=n_bytes, max_size=n_bytes))))
    codes = unpack(packed, bits)
    assert codes.shape == (units * unit(bits),)
    assert int(codes.max()) < 2**bits
    assert torch.equal(pack(codes, bits), packed), "a bit of the bytes is unused or used twice"


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dims", [64, 80, 96, 128, 256])
def test_each_bit_of_each_code_has_one_bit_of_its_own(bits, dims):
    one_hot = tensor([[(i == dim) << bit for i in range(dims)] for dim in range(dims) for bit in range(bits)])
    packed = pack(one_hot, bits).tolist()
    places = [int.from_bytes(bytes(row), "little") for row in packed]
    assert all(place.bit_count() == 1 for place in places)
    assert len(set(places)) == dims * bits == 8 * len(packed[0])


def test_int4_byte_j_is_dim_j_and_dim_j_plus_half():
    codes = tensor([0x1, 0x2, 0x3, 0x4, 0x5, 0x6, 0x7, 0x8])
    assert pack(codes, 4).tolist() == [0x51, 0x62, 0x73, 0x84]


def test_int2_byte_j_is_four_dims_a_quarter_apart():
    codes = tensor([0b01, 0b10, 0b11, 0b00, 0b10, 0b11, 0b00, 0b01])
    #                       dims 6 4 2 0     7 5 3 1
    assert pack(codes, 2).tolist() == [0b00_10_11_01, 0b01_11_00_10]


def test_int1_byte_j_is_eight_dims_an_eighth_apart():
    even = [1, 1, 0, 0, 1, 0, 1, 0]  # bits of byte 0, from the lowest up
    odd = [0, 0, 0, 1, 0, 1, 0, 1]
    codes = [code for pair in zip(even, odd, strict=True) for code in pair]
    assert pack(tensor(codes), 1).tolist() == [0b01010011, 0b10101000]


def test_int8_is_the_codes_themselves():
    codes = torch.arange(256).to(torch.uint8)
    assert torch.equal(pack(codes, 8), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        # low 2 bits of dims 6 4 2 0 and 7 5 3 1, then the third bit of dims 7…0
        (3, [0, 1, 2, 3, 4, 5, 6, 7], [0b10_00_10_00, 0b11_01_11_01, 0b11110000]),
        # low 4 bits of dims 4 0, 5 1, 6 2, 7 3, then the fifth bit of dims 7…0
        (5, [16, 1, 18, 3, 4, 21, 6, 31], [0x40, 0x51, 0x62, 0xF3, 0b10100101]),
        # low 4 bits of dims 2 0 and 3 1, then the high two bits of dims 3 2 1 0
        (6, [0x15, 0x2A, 0x37, 0x08], [0x75, 0x8A, 0b00_11_10_01]),
        # low 4 bits of dims 4 0, …, then bits 4 and 5 of dims 6 4 2 0 and 7 5 3 1, then bit 6 of dims 7…0
        (
            7,
            [0x10, 0x21, 0x32, 0x43, 0x54, 0x65, 0x76, 0x07],
            [0x40, 0x51, 0x62, 0x73, 0b11_01_11_01, 0b00_10_00_10, 0b01111000],
        ),
    ],
)
def test_other_widths_are_planes_of_powers_of_two(bits, codes, packed):
    assert pack(tensor(codes), bits).tolist() == packed
    assert unpack(tensor(packed), bits).tolist() == codes


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_and_bytes_need_not_be_contiguous(bits):
    codes = torch.randint(0, 2**bits, (5, 3, 16), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack(codes.contiguous(), bits)
    strided = torch.stack((codes, 255 - codes), dim=-1)[..., 0]
    assert torch.equal(pack(strided, bits), packed)
    assert torch.equal(pack(codes.transpose(0, 1), bits), packed.transpose(0, 1))
    page = torch.full((5, 3, packed.shape[-1] + 32), 0xFF, dtype=torch.uint8)
    page[..., 16:-16] = packed
    assert torch.equal(unpack(page[..., 16:-16].transpose(0, 1), bits), codes.transpose(0, 1))


@pytest.mark.parametrize("bits", WIDTHS)
def test_planes_and_sizes(bits):
    assert planes(bits) == PLANES[bits]
    for n in range(-8, 65):
        if n > 0 and n * bits % 8 == 0:
            assert packed_bytes(n, bits) == n * bits // 8
        else:
            with pytest.raises(ValueError, match=rf"{n} codes of {bits} bits do not fill whole bytes"):
                packed_bytes(n, bits)


@pytest.mark.parametrize("bits", [bits for bits in WIDTHS if bits != 8])
def test_counts_that_leave_bits_over_are_refused(bits):
    for n in range(unit(bits) + 1, 2 * unit(bits)):
        with pytest.raises(ValueError, match="do not fill whole bytes"):
            pack(torch.zeros(2, n, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        pack(torch.zeros(2, 0, dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [bits for bits in WIDTHS if bits not in (1, 2, 4, 8)])
def test_bytes_that_hold_no_whole_number_of_codes_are_refused(bits):
    whole = unit(bits) * bits // 8
    for n_bytes in range(whole + 1, 2 * whole):
        with pytest.raises(ValueError, match=f"{n_bytes} bytes do not hold whole codes of {bits} bits"):
            unpack(torch.zeros(2, n_bytes, dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [-1, 0, 9, 16])
def test_widths_outside_1_to_8_are_refused(bits):
    codes = torch.zeros(16, dtype=torch.uint8)
    for call in (lambda: planes(bits), lambda: packed_bytes(16, bits), lambda: pack(codes, bits)):
        with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
            call()
    with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
        unpack(codes, bits)
