"""Layouts and inline assembly of the Gluon kernel for integers: what a lane holds, and how words become operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.ops.attend.gluon.decode_tiles import log2

PLACES = gl.constexpr([[0, 1, 0], [0, 2, 0], [0, 4, 0]])


@gluon.constexpr_function
def key_parts(count, segments):
    """How many parts of a token's `count` words are multiplied apart: its segments, if each has a word per lane."""
    return segments if count >= 4 * segments else 1


@gluon.constexpr_function
def key_layout(count, parts):
    """[run, place, word]: the lanes of a run share the words of its tokens, part by part."""
    each = count // parts
    words = [[0, 0, 1 << i] for i in range(log2(each) - 2)] + ([[0, 0, each]] if parts == 2 else [])
    return gl.DistributedLinearLayout([*words, *PLACES.value], word_lanes(each), [], [], [8, 8, count])


@gluon.constexpr_function
def places_first(count):
    """[run, place, word] of one segment: registers in the order in which `unpack_bytes` takes them."""
    words = [[0, 0, 1 << i] for i in range(log2(count) - 2)]
    return gl.DistributedLinearLayout([*PLACES.value, *words], word_lanes(count), [], [], [8, 8, count])


@gluon.constexpr_function
def word_lanes(count):
    return [[0, 0, count // 4], [0, 0, count // 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]


@gluon.constexpr_function
def value_layout(count):
    """[run, half of a word of its tokens]; `count` halves per token."""
    rows = [[0, 8 << i] for i in range(log2(count) - 3)]
    places = [[0, count], [0, 2 * count], [0, 4 * count]]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout([[1, 0], *rows, *places], lanes, [], [], [8, 8 * count])


@gluon.constexpr_function
def flat(layout):
    """A layout of [run, place, word] as a layout of [run, word of its tokens]."""
    count = layout.shape[2]
    registers = [[run, place * count + word] for run, place, word in layout.reg_bases]
    lanes = [[run, place * count + word] for run, place, word in layout.lane_bases]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [8, 8 * count])


@gluon.constexpr_function
def copy_layout(count, page):
    """[run, word of its tokens]: 16 bytes per lane. Runs that may lie in different pages have lanes of their own."""
    lanes = min(4 if page % 64 else 32, 2 * count)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.constexpr_function
def meta_layout(segments):
    """[run, place(, segment)]: all lanes of a run hold the same."""
    if segments == 2:
        lanes = [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
        return gl.DistributedLinearLayout([[0, 0, 1], *PLACES.value], lanes, [], [], [8, 8, 2])
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]], lanes, [], [], [8, 8])


@gluon.constexpr_function
def with_bits(shape, count):
    """A shape with a trailing dimension per bit of numbers below `count`."""
    return tuple(shape) + (2,) * log2(count)


@gluon.constexpr_function
def around_bits(before, first, count, after):
    """The permutation that puts the dimensions of `with_bits`, from the `first` on, between `before` and `after`."""
    return tuple(before) + tuple(range(first, first + log2(count)))[::-1] + tuple(after)


# --- inline assembly: from words to operands, one output register per code of a byte


@gluon.constexpr_function
def unpack_bytes(bits):
    """PTX that unpacks one word of each of four tokens. A result holds one code of each of the four bytes of a word.

    Codes of the high nibble are moved to the low one.
    """
    codes = 8 // bits
    words = [f"${4 * codes + i}" for i in range(4)]
    if bits == 8:
        return "\n".join(f"xor.b32 ${i}, {word}, 0x80808080;" for i, word in enumerate(words))  # signed: 128 less
    lines = ["{ .reg .b32 a, b, c, d;", *(f"shr.u32 {to}, {word}, 4;" for to, word in zip("abcd", words, strict=True))]
    masks = [((2**bits - 1) << bits * i) * 0x01010101 for i in range(4 // bits)]
    pairs = [(source, mask) for sources in (words, "abcd") for mask in masks for source in sources]
    return "\n".join([*lines, *masked(pairs), "}"])


@gluon.constexpr_function
def unpack_halves(bits):
    """PTX that unpacks half a word of each of two tokens. A result is a pair (first token, second token).

    Per byte there is one result per code but the highest, then one for the whole byte.
    """
    codes = 8 // bits
    masks = [((2**bits - 1) << bits * i) * 0x00010001 for i in range(codes - 1)]
    low = masked([(f"${2 * codes}", mask) for mask in [*masks, 0x00FF00FF]])
    high = f"prmt.b32 ${2 * codes - 1}, ${2 * codes}, 0, 0x4341;"  # bytes 1 and 3
    return "\n".join([*low, high, *masked([(f"${2 * codes - 1}", mask) for mask in masks], codes)])


@gluon.constexpr_function
def masked(pairs, first=0):
    return [f"and.b32 ${i}, {source}, {mask:#x};" for i, (source, mask) in enumerate(pairs, first)]


@gluon.constexpr_function
def registers(outputs, inputs):
    return ",".join(["=r"] * outputs + ["r"] * inputs)


@gluon.constexpr_function
def repeated(dtype, count):
    return (dtype,) * count
