"""What the Gluon kernels share: tiles of 64 tokens, 8 runs of 8, and how weights become an operand of the next MMA.

A CTA is one warp. Lanes are numbered 4·run + lane of the run, as in MMA fragments.

A CTA takes QUERIES queries of a sequence, in the RATIO query heads of a KV head. To the products, each of them is a
head: number query · RATIO + query head. HEADS is how many of them there are, up to 4, 8 or 16. If a sequence has more
queries, several CTAs read the same tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = 64  # tokens
UNSEEN = gl.constexpr(-1e30)


@gluon.jit
def own_queries(query_starts, lengths, tokens, groups, RATIO: gl.constexpr, QUERIES: gl.constexpr):
    """The share of a CTA. Returns

    - its split of the tokens, and how many splits there are;
    - the row of its first query in q, the number of rows, and how many heads of the CTA are live, 0 or less if none;
    - the length of the sequence up to its first query, and with the last one;
    - `latest`, see `own_tiles`.

    Without `query_starts`, every sequence has one query. With them, `groups` CTAs share the queries of a sequence.
    """
    split, splits, sequence = gl.program_id(0), gl.num_programs(0), gl.program_id(2)
    if query_starts is None:
        length = gl.load(lengths + sequence)
        return split, splits, sequence, gl.num_programs(2), RATIO, length, length, 2
    else:
        begin, end = gl.load(query_starts + sequence), gl.load(query_starts + sequence + 1)
        before = split % groups * QUERIES
        first = gl.load(lengths + sequence) - (end - begin) + before + 1
        count = gl.minimum(end - begin - before, QUERIES)
        length = gl.where(count > 0, first + count - 1, 0)
        latest = 2 * QUERIES * groups
        return split // groups, splits // groups, begin + before, tokens, count * RATIO, first, length, latest


@gluon.jit
def row_of(head, stride, RATIO: gl.constexpr, QUERIES: gl.constexpr, EACH: gl.constexpr):
    """Where a head of a CTA lies, if query heads are EACH apart and tokens `stride`."""
    if QUERIES == 1:
        return head * EACH
    else:
        return head // RATIO * stride + head % RATIO * EACH


@gluon.jit
def packed_to(length, BLOCK: gl.constexpr):
    """How many tokens the last query of a sequence of `length` tokens reads packed: `open_block.raw_from`."""
    if BLOCK == 0:
        return length
    else:
        return (length - 1) // BLOCK * BLOCK


@gluon.jit
def own_tiles(split, splits, readers, less, length, latest, BLOCK: gl.constexpr):
    """What a CTA reads packed. Returns

    - `end` of the tokens that the sequence reads packed; the last tile may hold others, too;
    - the first and the last tile of this CTA;
    - `newest`, the first tile that may hold a token of this step.

    The first `readers` of the splits also read raw tokens, and so `less` tiles fewer than the others.

    Of this step's tokens, a sequence may read its own and as many before them: the `latest`. Another sequence may store
    those before them in this step, as the last tokens of a page that both share.
    """
    end = packed_to(length, BLOCK)
    tiles = gl.maximum((end + 63) // 64, 0)
    others = splits - readers
    few = (gl.maximum(tiles - others * less, 0) + splits - 1) // splits
    share = (gl.maximum(tiles - readers * few, 0) + others - 1) // gl.maximum(others, 1)
    first = gl.minimum(split, readers) * few + gl.maximum(split - readers, 0) * share
    last = gl.minimum(first + gl.where(split < readers, few, share), tiles) - 1
    return end, first, last, gl.maximum(length - latest, 0) // 64


@gluon.jit
def wait_for_stored(tile, newest, OVERLAP: gl.constexpr):
    """Wait before reading a tile that may hold tokens of this step: `store` may still run."""
    if tile >= newest:
        wait_by(OVERLAP, "end")


@gluon.jit
def wait_by(OVERLAP: gl.constexpr, PLACE: gl.constexpr):
    """Wait (see pdl.py) if it is due at PLACE or was due before. A second wait costs nothing."""
    if OVERLAP.wait == PLACE or (OVERLAP.wait == "start" and PLACE == "end"):
        control("griddepcontrol.wait")


@gluon.jit
def release_next(OVERLAP: gl.constexpr):
    """Release the next kernel, if it may begin before this one has ended."""
    if OVERLAP.release == "end":
        control("griddepcontrol.launch_dependents")


@gluon.jit
def seen_tokens(tile, end, LOGITS: gl.constexpr):
    """bool[place, run, 1]: which tokens of a tile are read packed."""
    run = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LOGITS)))
    place = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LOGITS)))
    token = tile * 64 + run[None, :] * 8 + place[:, None]
    return (token < end)[:, :, None]


@gluon.jit
def seen_by_each(seen, tile, length, BLOCK: gl.constexpr, LOGITS: gl.constexpr, RATIO: gl.constexpr,
                 QUERIES: gl.constexpr, HEADS: gl.constexpr):  # fmt: skip
    """bool[place, run, head]: which tokens of a tile each query reads packed, of those that any query does. `length`
    is that of the sequence up to the first query."""
    if QUERIES > 1:
        run = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LOGITS)))
        place = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LOGITS)))
        query = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(0, LOGITS))) // RATIO
        token = tile * 64 + run[None, :] * 8 + place[:, None]
        seen = seen & (token[:, :, None] < packed_to(length + query, BLOCK)[None, :][None, :, :])
    return seen


@gluon.jit
def differs(tile, TILES: gl.constexpr, whole, near):
    """Whether some tokens of these tiles are not read as all others are: a query does not read them, or the first one
    is the first of the sequence, whose key lies `near` something (see `Codec.first`)."""
    special = tile * 64 + 64 * TILES > whole
    if near is not None:
        special = special | (tile == 0)
    return special


@gluon.jit
def logits_near(q, near, tile, live, scale, stride, DIMS: gl.constexpr, RATIO: gl.constexpr, QUERIES: gl.constexpr,
                HEADS: gl.constexpr, HEAD: gl.constexpr):  # fmt: skip
    """Per head, scale·q·near: what the logit of a sequence's first token lacks. 0 for CTAs whose first tile is not the
    sequence's."""
    lacking = gl.zeros([HEADS], gl.float32, HEAD)
    if near is not None:  # noqa: SIM102, this is known when the kernel is compiled
        if tile == 0:
            LAYOUT: gl.constexpr = _query_layout(DIMS, HEADS)
            coordinate = gl.arange(0, DIMS, gl.SliceLayout(1, LAYOUT))
            head = gl.arange(0, HEADS, gl.SliceLayout(0, LAYOUT))
            at = row_of(head, stride, RATIO, QUERIES, DIMS)[None, :] + coordinate[:, None]
            x = gl.load(q + at, mask=(head < live)[None, :], other=0.0).to(gl.float32)
            y = gl.load(near + gl.program_id(1) * DIMS + coordinate)
            lacking = gl.convert_layout(gl.sum(x * y[:, None], 0) * scale, HEAD, assert_trivial=True)
    return lacking


@gluon.jit
def with_first(logits, tile, lacking, near, LOGITS: gl.constexpr):
    """Logits [place, run, head] of a tile, with what that of the sequence's first token lacks."""
    if near is not None:
        run = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LOGITS)))
        place = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LOGITS)))
        token = tile * 64 + run[None, :] * 8 + place[:, None]
        logits += gl.where((token == 0)[:, :, None], lacking[None, :][None, :, :], 0.0)
    return logits


@gluon.jit
def softmax(logits, highest, total):
    """The weights of a tile, the factor for earlier tiles, and the running maximum and sum."""
    now = gl.maximum(highest, gl.max(gl.max(logits, 0), 0))
    fade = exp2(highest - now)
    weight = exp2(logits - now[None, :][None, :, :])
    return weight, fade, now, total * fade[None, :] + gl.sum(weight, 0)


@gluon.jit
def weights_operand(first, second, VALUE: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr, MMA: gl.constexpr):
    """Weights [place, run, head], per segment of values -> the second operand of outputs, [token, column]."""
    if COLUMNS == 2 * HEADS:
        other = second if VALUE.segments == 2 else gl.zeros_like(first)
        weights = gl.reshape(gl.join(first, other), [8, 8, COLUMNS])
    else:
        weights = gl.permute(gl.reshape(first, [8, 8, HEADS // 8, 2, 4]), [0, 1, 2, 4, 3])
        weights = gl.reshape(weights, [8, 8, HEADS])
    return transposed(gl.convert_layout(weights, weights_layout(COLUMNS), assert_trivial=True), MMA)


@gluon.jit
def transposed(weights, MMA: gl.constexpr):
    """Weights [token // 8, token % 8, column], as MMA returns them -> the second operand of outputs [token, column]."""
    TOKENS: gl.constexpr = 8 * weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[2]
    turned = gl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.f16x2.f32 pair, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, pair; }",
        "=r,f,f", [weights], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    if COLUMNS == 8:
        turned = gl.permute(turned, [0, 2, 1])
    else:
        turned = gl.permute(gl.reshape(turned, [TOKENS // 8, 8, COLUMNS // 8, 8]), [0, 3, 2, 1])
    turned = gl.reshape(turned, [TOKENS, COLUMNS])
    return gl.convert_layout(turned, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def faded(out, fade, VALUE: gl.constexpr, DIMS: gl.constexpr, HEADS: gl.constexpr, COLUMNS: gl.constexpr,
           MMA: gl.constexpr):  # fmt: skip
    """Outputs so far [coordinate, column], times the `fade` of their head."""
    if COLUMNS == 2 * HEADS:
        first, second = gl.split(gl.reshape(out, [DIMS, HEADS, 2]))
        by = gl.convert_layout(fade, gl.SliceLayout(0, first.type.layout), assert_trivial=True)[None, :]
        if VALUE.segments == 2:
            second = second * by
        out = gl.convert_layout(gl.reshape(gl.join(first * by, second), [DIMS, COLUMNS]), MMA, assert_trivial=True)
    else:
        out = out * gl.convert_layout(in_columns(fade), gl.SliceLayout(0, MMA), assert_trivial=True)[None, :]
    return out


@gluon.jit
def in_columns(x):
    """[heads] -> [columns]: of each 8 heads, n and n + 4, which one lane holds, become a pair of columns."""
    HEADS: gl.constexpr = x.shape[0]
    return gl.reshape(gl.permute(gl.reshape(x, [HEADS // 8, 2, 4]), [0, 2, 1]), [HEADS])


@gluon.jit
def head_in(column, HEADS: gl.constexpr):
    """The head of a column of `in_columns`."""
    if HEADS == 8:
        return column // 2 + column % 2 * 4
    else:
        return column // 8 * 8 + column % 8 // 2 + column % 2 * 4


@gluon.jit
def store_weights(weights, highest, total, live, stride, RATIO: gl.constexpr, QUERIES: gl.constexpr,
                  HEADS: gl.constexpr):  # fmt: skip
    """Per head, the log2 of the sum of this CTA's weights. Tokens are `stride` apart."""
    number = gl.arange(0, HEADS, total.type.layout)
    weight = gl.where(total > 0.0, highest + gl.log2(total), UNSEEN)
    gl.store(weights + row_of(number, stride, RATIO, QUERIES, 1), weight, mask=number < live)


@gluon.jit
def joined(halves):
    """Tensors as one tensor, with a trailing dimension per bit of a tensor's number, the lowest bit first."""
    for _ in gl.static_range(6):
        if len(halves) > 1:
            pairs = ()
            for i in gl.static_range(len(halves) // 2):
                pairs += (gl.join(halves[2 * i], halves[2 * i + 1]),)
            halves = pairs
    return halves[0]


@gluon.jit
def control(INSTRUCTION: gl.constexpr):
    """An instruction that no tensor depends on."""
    nothing = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        INSTRUCTION + "; mov.b32 $0, $1;", "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def float_pair(word):
    """The two float16 numbers in each word, the low one first."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# --- layouts: what a lane holds


@gluon.constexpr_function
def logits_layout(heads):
    """[place, run, head]: as MMA returns [token, head, byte], with the two bytes added up."""
    registers = [[0, 0, 4 << i] for i in range(log2(heads // 4))] + [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [8, 8, heads])


@gluon.constexpr_function
def _query_layout(dims, heads):
    """[coordinate, head]: a lane has the heads that it has of logits, and neighbouring coordinates."""
    own = [[1 << i, 0] for i in range(log2(dims) - 3)]
    lanes = [[0, 1], [0, 2], *([dims >> i, 0] for i in (3, 2, 1))]
    return gl.DistributedLinearLayout(
        [*own, *([0, 4 << i] for i in range(log2(heads // 4)))], lanes, [], [], [dims, heads]
    )


@gluon.constexpr_function
def weights_layout(columns):
    """[place, run, column], as MMA returns it."""
    high = [[0, 0, 8 << i] for i in range(log2(columns // 8))]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    registers = [[0, 0, 1], *high, [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [8, 8, columns])


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1
