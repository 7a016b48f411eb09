"""Layouts and inline assembly of the Gluon kernel for evenly spaced levels: what a lane holds of a segment.

A token has `words` words of a segment. Either a lane of a run has words of its own, or up to four lanes share one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvfold.ops.attend.gluon.decode_tiles import log2
from kvfold.ops.attend.gluon.integer_layouts import PLACES, masked, unpack_bytes


@gluon.constexpr_function
def sharing(words):
    """How many lanes share a word."""
    return max(1, 4 // words)


@gluon.constexpr_function
def codes_per_lane(bits, words):
    """How many codes a lane takes of every byte."""
    return 8 // bits // sharing(words)


@gluon.constexpr_function
def key_middle(bits):
    """The middle of the codes as `unpack_shared_bytes` returns them."""
    return -0.5 if bits == 8 else (2**bits - 1) / 2


@gluon.constexpr_function
def key_coordinate(bit, bits, words):
    """What a bit of an index of a segment's operand adds to the coordinate. An index has, from the low bits up: the
    byte of a word, the lane, the word of the lane, the code. Lanes that share a word differ in their low bits."""
    shared, own = log2(sharing(words)), log2(max(1, words // 4))
    code = 4 * words  # from code to code of a byte
    if bit < 2:
        return 1 << bit
    if bit < 2 + shared:
        return code * codes_per_lane(bits, words) << (bit - 2)
    if bit < 4:
        return 4 * max(1, words // 4) << (bit - 2 - shared)
    return 4 << (bit - 4) if bit < 4 + own else code << (bit - 4 - own)


@gluon.constexpr_function
def sharing_layout(words):
    """[run, place, word, number among the lanes that share it]; registers in the order of `unpack_shared_bytes`."""
    each = max(1, words // 4)
    own = [[0, 0, 1 << i, 0] for i in range(log2(each))]
    lanes = [[0, 0, 0, 1 << i] for i in range(log2(sharing(words)))]
    lanes += [[0, 0, each << i, 0] for i in range(log2(words // each))]
    runs = [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    places = [[*place, 0] for place in PLACES.value]
    return gl.DistributedLinearLayout([*places, *own], [*lanes, *runs], [], [], [8, 8, words, sharing(words)])


@gluon.constexpr_function
def shared_words(words):
    """Words of keys in shared memory, [run, word of its tokens], so that lanes of all runs read different banks."""
    if words >= 4:
        return gl.SwizzledSharedLayout(words, 1, 8, [1, 0])
    return gl.SwizzledSharedLayout(4, 4 // words, 2 * words, [1, 0])


@gluon.constexpr_function
def copied_scales(rows):
    """[run, segment, word]: 8 bytes per lane."""
    return gl.BlockedLayout([1, 1, 2], [8, 4, 1], [1, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def scale_layout(rows):
    """[run, segment, word]: all lanes of a run hold the same."""
    own = [[0, 0, 1], *([0, 1 << i, 0] for i in range(log2(rows)))]
    lanes = [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(own, lanes, [], [], [8, rows, 2])


# --- inline assembly


@gluon.constexpr_function
def unpack_shared_bytes(bits, lanes):
    """PTX that unpacks one word of each of four tokens, for one of `lanes` lanes that share it: `unpack_bytes` of the
    codes of this lane. Inputs are four words, and four times by how many bits the lane shifts them."""
    if lanes == 1:
        return unpack_bytes(bits)
    codes = 8 // bits // lanes
    lines = [f"shr.u32 {to}, ${4 * codes + i}, ${4 * codes + 4 + i};" for i, to in enumerate("abcd")]
    masks = [((2**bits - 1) << bits * i) * 0x01010101 for i in range(codes)]
    return "\n".join(
        ["{ .reg .b32 a, b, c, d;", *lines, *masked([(word, mask) for mask in masks for word in "abcd"]), "}"]
    )


@gluon.constexpr_function
def unpack_scales():
    """PTX that makes float32 numbers of the four bytes of a word. A byte is shifted to bit 19. The lower bits of a
    number may hold 3 bits of another byte: less than 2^-20 of it."""
    return """{ .reg .b32 a, b;
    and.b32 a, $4, 0xff0000ff;
    prmt.b32 b, $4, 0, 0x2441;
    shl.b32 $0, a, 19;
    shl.b32 $1, b, 19;
    shr.u32 $2, b, 5;
    shr.u32 $3, a, 5; }"""
