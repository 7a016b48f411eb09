"""How the Gluon kernel for codebooks turns packed codes into float16 levels in registers: which words a lane loads, the
PTX that decodes them, and the coordinates that come out.

The codes of a segment of n coordinates lie in n/32 *columns*. Column j is the words j, n/32 + j, 2·n/32 + j, … of the
codes, one word per bit, and holds 32 codes. Its byte i holds the coordinates p·n/8 + 4·j + i, for *parts* p from 0 to 7
(see packing.py). Lanes share columns evenly. With fewer columns than lanes, `share` lanes divide the parts of a column:
lane u takes the parts with p % 4 = u, u + share, …

A *lookup* decodes parts p and p + 4 together. Up to 4 bits of each code are a nibble of a word. `prmt` takes 4 nibbles
as indices into a table of 8 bytes: once for the high bytes of levels, once for the low bytes. Then both are joined to
float16 numbers. Levels are symmetric. So from 4 bits on, tables hold magnitudes, and a sign is added.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from triton.experimental import gluon

from kvfold.format.packing import planes
from kvfold.quantizers import lloyd_max

MAX_BITS = 6
PRODUCTS = (16,)  # shifts that are done by multiplying, on another unit than `prmt`
KEY_LANES, VALUE_LANES = 4, 8  # lanes that share the codes of a token


class Word(NamedTuple):
    """A word that every lane loads per token: word first + lane's column + lane's u % width · columns."""

    first: int
    width: int  # of its plane


class Lookup(NamedTuple):
    """Decodes 8 codes per token."""

    words: tuple[int, ...]  # which of the lane's words, one per plane
    program: str  # PTX
    constants: tuple[int, ...]  # its operands after words and u


class Codebook(NamedTuple):
    """Tables of levels times `scale`, rounded to float16."""

    scale: float
    halves: tuple[int, ...]  # levels in ascending order; from 4 bits on, magnitudes in descending order


@lru_cache
def codebook(bits: int) -> Codebook:
    levels = np.array(lloyd_max.levels(bits))
    if bits < 4:
        return _codebook(levels, 1.0)
    magnitudes = -levels[: len(levels) // 2]
    if bits == 5:  # a scale at which `_sixteen` can look up
        return min((book for book in _scaled(magnitudes) if _pairs(book)), key=lambda book: _error(book, magnitudes))
    return _codebook(magnitudes, 1.0)


def _codebook(numbers: np.ndarray, scale: float) -> Codebook:
    return Codebook(scale, tuple((scale * numbers).astype(np.float16).view(np.uint16).tolist()))


def _scaled(numbers: np.ndarray) -> list[Codebook]:
    return [_codebook(numbers, float(scale)) for scale in np.exp2(np.arange(0, 1, 2**-12))]


def _pairs(book: Codebook) -> bool:
    """Whether entries i and i + 8 agree in the high bit of their low byte."""
    return all((a ^ b) & 0x80 == 0 for a, b in zip(book.halves[:8], book.halves[8:], strict=True))


def _error(book: Codebook, numbers: np.ndarray) -> float:
    rounded = np.array(book.halves, np.uint16).view(np.float16) / book.scale
    return float(np.abs(rounded / numbers - 1).max())


# --- what a lane holds


def share(columns: int, lanes: int) -> int:
    """How many lanes divide the parts of a column."""
    return max(1, lanes // columns)


@lru_cache
def lane_words(bits: int, columns: int, lanes: int) -> tuple[Word, ...]:
    """The words that a lane loads of a segment: column by column, planes in order."""
    by, words = share(columns, lanes), []
    for first in range(0, columns, lanes):
        for width in planes(bits):
            words += [Word(first + by * i * columns, width) for i in range(max(1, width // by))]
            first += width * columns
    return tuple(words)


@lru_cache
def lane_lookups(bits: int, columns: int, lanes: int) -> tuple[Lookup, ...]:
    """How a lane decodes these words."""
    by = share(columns, lanes)
    counts = [max(1, width // by) for width in planes(bits)]
    begins = list(accumulate(counts, initial=0))
    return tuple(
        Lookup(
            tuple(column * begins[-1] + begin + turn % count for begin, count in zip(begins, counts, strict=False)),
            *_program(bits, by, turn, across=lanes == VALUE_LANES),
        )
        for column in range(max(1, columns // lanes))
        for turn in range(4 // by)
    )


@gluon.jit
def coordinate(lookup, byte, high, lane, COLUMNS, LANES, SHARE):
    """The coordinate that a lookup of a lane finds in a byte of its words: of part p or, if `high`, of p + 4."""
    part = lane // COLUMNS + lookup % (4 // SHARE) * SHARE + 4 * high
    column = lane % COLUMNS + lookup // (4 // SHARE) * LANES
    return part * (4 * COLUMNS) + 4 * column + byte


# --- PTX


def _program(bits: int, by: int, turn: int, across: bool) -> tuple[str, tuple[int, ...]]:
    """PTX that decodes two tokens to 8 pairs of float16, and its constants.

    Each operand comes once per token: a word per plane, u, and the constants. The pairs are:

    - without `across`, parts p and p + 4 of one token: at bytes 0 to 3 of the first token, then of the second;
    - with `across`, the two tokens: at bytes 0 to 3 of part p, then of part p + 4.
    """
    code = _Code(10 + 2 * len(planes(bits)))
    words = {width: (f"${8 + 2 * i}", f"${9 + 2 * i}") for i, width in enumerate(planes(bits))}
    u = f"${8 + 2 * len(words)}"
    if across:  # bytes 0 and 1 of both tokens, then 2 and 3
        words = {width: (code("prmt", *two, 0x5140), code("prmt", *two, 0x7362)) for width, two in words.items()}
    for i in range(2):
        nibbles = {width: _aligned(code, width, two[i], u, by, turn) for width, two in words.items()}
        low, high = _levels(code, bits, nibbles)
        for half in range(2):
            numbers = (2 * i + half, 2 * i + half + 4) if across else (4 * i + 2 * half, 4 * i + 2 * half + 1)
            for number, selector in zip(numbers, (0x6240, 0x7351) if across else (0x5140, 0x7362), strict=True):
                code.put(f"${number}", "prmt", low[half], high[half], selector)
    return str(code), tuple(code.constants)


class _Code:
    """Lines of PTX, each with a result register of its own.

    An instruction takes at most one immediate, and a table of 8 bytes needs two. So one half of a table is an operand,
    with a number from `free` on. Otherwise the compiler would move it to a register before every lookup.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self.lines: list[str] = []
        self.constants: list[int] = []

    def __call__(self, operation: str, *sources: str | int) -> str:
        register = f"r{len(self.lines)}"
        self.put(register, operation, *sources)
        return register

    def put(self, register: str, operation: str, *sources: str | int) -> None:
        kind = {"shr": "u32", "mad.lo": "u32", "mul.lo": "u32", "mul.hi": "u32"}.get(operation, "b32")
        names = (hex(source) if isinstance(source, int) else source for source in sources)
        self.lines.append(f"{operation}.{kind} {register}, {', '.join(names)};")

    def shifted(self, word: str, by: int) -> str:
        if by in PRODUCTS:
            return self("mul.hi", word, self.constant(1 << (32 - by)))
        return self("shr", word, by) if by else word

    def table(self, numbers: list[int], selector: str) -> str:
        """Up to 8 bytes, looked up by the low 4 nibbles of the selector."""
        low, high = (int.from_bytes(bytes(numbers[i : i + 4]), "little") for i in (0, 4))
        return self("prmt", self.constant(low), high, selector)

    def constant(self, number: int) -> str:
        if number not in self.constants:
            self.constants.append(number)
        return f"${self.free + 2 * self.constants.index(number)}"

    def __str__(self) -> str:
        return "\n".join([f"{{ .reg .b32 r<{len(self.lines)}>;", *self.lines, "}"])


def _aligned(code: _Code, width: int, word: str, u: str, by: int, turn: int) -> str:
    """The bits of a plane for parts p and p + 4, at the low end of nibbles; above them are other bits."""
    if width == 2:
        return code("shr", word, code("and", u, 2)) if by == 4 else code.shifted(word, 2 * (turn // (2 // by)))
    elif width == 1:
        return code.shifted(word if by == 1 else code("shr", word, u), by * turn)
    return word


def _levels(code: _Code, bits: int, planes: dict[int, str]) -> tuple[list[str], list[str]]:
    """The low and the high bytes of the levels of 8 codes, 4 per register, out of one word per plane."""
    ones, threes = 0x11111111, 0x33333333
    low_bytes, high_bytes = _bytes(codebook(bits).halves)
    if bits < 4:
        if bits == 3:
            index = code("mad.lo", code("and", planes[1], ones), 4, code("and", planes[2], threes))
        else:
            index = code("and", planes[bits], (2**bits - 1) * ones)
        both = [index, code.shifted(index, 16)]
        low, high = ([code.table(table, selector) for selector in both] for table in (low_bytes, high_bytes))
        return low, high
    # codes of positive levels, whose highest bit is 1, are inverted: index 0 is the largest magnitude
    if bits == 4:
        positive = code("and", code("shr", planes[4], 3), ones)
        index = code("and", code("xor", planes[4], code("mul.lo", positive, 7)), 0x77777777)
        above = None
    else:
        sign = code("shr", planes[2], 1) if bits == 6 else planes[1]
        positive = code("and", sign, ones)
        index = code("xor", planes[4], code("mul.lo", positive, 15))
        above = code("xor", positive, code("and", planes[2], ones)) if bits == 6 else None
    low, high = [], []
    for by in (0, 16):
        selector, negative = code.shifted(index, by), code.table([0x80, 0], code.shifted(positive, by))
        if bits == 4:
            low.append(code.table(low_bytes, selector))
            magnitude = code.table(high_bytes, selector)
        elif bits == 5:
            low.append(_sixteen(code, low_bytes, selector))
            magnitude = _sixteen(code, high_bytes, selector)
        else:
            assert above is not None
            by_16 = code.table([0, 0xFF], code.shifted(above, by))
            by_8 = code.table([0, 0xFF], code("and", code("shr", selector, 3), ones))
            selector = code("and", selector, 0x7777)
            low.append(_thirty_two(code, low_bytes, selector, by_8, by_16))
            magnitude = _thirty_two(code, high_bytes, selector, by_8, by_16)
        high.append(code("xor", magnitude, negative))
    return low, high


def _bytes(halves: tuple[int, ...]) -> tuple[list[int], list[int]]:
    return [half & 255 for half in halves], [half >> 8 for half in halves]


def _sixteen(code: _Code, table: list[int], selector: str) -> str:
    """Look 4-bit nibbles up in 16 bytes. Bytes i and i + 8 agree in their high bit.

    For a nibble 8 + i, `prmt` returns the high bit of byte i, 8 times. The results of both half tables are
    XORed: one is the byte, the other 0x00 or 0xFF. Bytes of the second half whose high bit is 1 are stored inverted.
    """
    second = [byte ^ 0xFF if byte & 0x80 else byte for byte in table[8:]]
    return code("xor", code.table(table[:8], selector), code.table(second, code("xor", selector, 0x88888888)))


def _thirty_two(code: _Code, table: list[int], selector: str, by_8: str, by_16: str) -> str:
    """Look 3-bit nibbles up in 32 bytes: 8 bytes further on if `by_8` is 0xFF, 16 further on if `by_16` is."""
    parts = [code.table(table[i : i + 8], selector) for i in range(0, 32, 8)]
    return _chosen(code, by_16, *(_chosen(code, by_8, *parts[i : i + 2]) for i in (0, 2)))


def _chosen(code: _Code, mask: str, zero: str, one: str) -> str:
    return code("or", code("and", one, mask), code("and", zero, code("not", mask)))
