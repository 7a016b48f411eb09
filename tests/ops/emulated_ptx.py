"""PTX of kernels with one warp per CTA, run by NumPy: a register is an array of 32 lanes.

It knows the instructions that the Gluon decode kernels are made of. Lanes must branch together. What is copied to
shared memory arrives when the kernel waits for it, not before.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

LANES = np.arange(32)
GROUP, MEMBER = LANES // 4, LANES % 4  # of a lane, in MMA fragments
SIZES = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
MASKED = {"ld", "st", "cp", "bra"}  # instructions that look at their predicate themselves
IGNORED = {"bar", "griddepcontrol"}  # there is one warp, and one kernel
TOKEN = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*")

Registers = dict[str, np.ndarray]


def _type(name: str) -> Any:
    """The NumPy type of a suffix as s32 or f16x2."""
    kind, size = name[0], re.findall(r"\d+", name)[0]
    return np.dtype(f"{'i' if kind == 's' else 'f' if kind == 'f' else 'u'}{int(size) // 8}")


class Memory:
    """Tensors at addresses of their own."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """The address of an array, whose bytes kernels may change."""
        self.arrays.append(array.reshape(-1).view(np.uint8))
        return len(self.arrays) << 40

    def _at(self, address: int, size: int) -> tuple[np.ndarray, int]:
        array, offset = self.arrays[(address >> 40) - 1], address & (1 << 40) - 1
        assert offset + size <= len(array), f"bytes {offset} to {offset + size} of {len(array)}"
        assert offset % min(size, 16) == 0, f"{size} bytes at {offset}"
        return array, offset

    def read(self, address: int, size: int) -> np.ndarray:
        array, offset = self._at(address, size)
        return array[offset : offset + size]

    def write(self, address: int, data: np.ndarray) -> None:
        array, offset = self._at(address, len(data))
        array[offset : offset + len(data)] = data


class Program:
    """A kernel, from its PTX."""

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.rindex("}")]
        body = re.sub(r"//[^\n]*", "", body)
        self.steps: list[tuple[str, str, list[str]]] = []  # predicate, name, operands
        self.labels: dict[str, int] = {}
        for line in re.split(r"[;\n]", body):
            text = line.strip()
            if text.count("{") != text.count("}"):  # a block of inline assembly begins or ends
                text = text.strip("{} ")
            if match := re.fullmatch(r"(\$\w+):", text):
                self.labels[match[1]] = len(self.steps)
            elif text and not text.startswith((".", "{")):
                predicate, text = text.split(None, 1) if text.startswith("@") else ("", text)
                name, _, rest = text.partition(" ") if " " in text else text.partition("\t")
                self.steps.append((predicate[1:], name.strip(), [part.strip() for part in TOKEN.findall(rest)]))

    def launch(self, grid: tuple[int, int, int], memory: Memory, shared: int, *arguments: int | float) -> None:
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    _Warp(self, memory, shared, arguments, grid, (x, y, z)).run()


class _Warp:
    def __init__(
        self,
        program: Program,
        memory: Memory,
        shared: int,
        arguments: tuple[int | float, ...],
        grid: tuple[int, int, int],
        cta: tuple[int, int, int],
    ) -> None:
        self.program, self.memory, self.arguments = program, memory, arguments
        self.shared = np.zeros(shared, np.uint8)
        below = (1 << LANES) - 1
        self.special = {"%tid.x": LANES, "%laneid": LANES, "%lanemask_lt": below, "%lanemask_ge": 2**32 - 1 - below}
        for axis, count, number in zip("xyz", grid, cta, strict=True):
            self.special |= {f"%nctaid.{axis}": np.full(32, count), f"%ctaid.{axis}": np.full(32, number)}
        self.registers: Registers = {}
        self.copies: list[list[Callable[[], None]]] = []  # committed groups that have not arrived
        self.group: list[Callable[[], None]] = []

    def run(self) -> None:
        at = 0
        while at < len(self.program.steps):
            predicate, name, operands = self.program.steps[at]
            at += 1
            mask = np.ones(32, bool)
            if predicate:
                mask = self.registers[predicate.lstrip("!")] ^ predicate.startswith("!")
            first, *suffixes = name.split(".")
            if first == "ret":
                return
            if first == "bra":
                assert mask.all() == mask.any(), "lanes branch apart"
                at = self.program.labels[operands[0]] if mask.all() else at
            elif first in MASKED:
                getattr(self, f"_{first}")(suffixes, operands, mask)
            elif first not in IGNORED:
                results = getattr(self, f"_{first}")(suffixes, *operands[1:])
                if first == "mov" and operands[0].startswith("{"):  # a word to two halves
                    results = list(results.view(np.uint16).reshape(32, 2).T.copy())
                for to, result in zip(_names(operands[0]), _listed(results), strict=True):
                    if not mask.all():
                        result = np.where(mask, result.view(_bits(result)), self.registers[to].view(_bits(result)))
                    self.registers[to] = result

    # --- operands

    def _get(self, text: str, kind: str) -> np.ndarray:
        """An operand in the type of a suffix."""
        if kind == "pred":
            return self.registers[text] if text in self.registers else np.full(32, int(text, 0) != 0)
        dtype = _type(kind)
        if text in self.registers:
            register = self.registers[text]
            if dtype.itemsize < register.itemsize:  # its low bits
                register = register.view(_bits(register)).astype(_bits(dtype))
            return register.view(dtype)
        if text in self.special:
            return self.special[text].astype(np.uint32).view(dtype)
        if text.startswith("0f"):
            return np.full(32, int(text[2:], 16), np.uint32).view(dtype)
        if text == "global_smem":
            return np.zeros(32, dtype)
        return np.full(32, int(text.rstrip("U"), 0) & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)

    def _all(self, suffixes: list[str], texts: tuple[str, ...]) -> list[np.ndarray]:
        return [self._get(text, suffixes[-1]) for text in texts]

    def _addresses(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[]").replace(" ", "").partition("+")
        register = np.zeros(32, np.uint64) if base == "global_smem" else self.registers[base].astype(np.uint64)
        return register + np.uint64(int(offset or "0", 0))

    # --- arithmetic

    def _mov(self, suffixes: list[str], source: str) -> Any:
        if source.startswith("{"):  # two halves to a word
            low, high = (self._get(name, "b16").astype(np.uint32) for name in _names(source))
            return low | high << 16
        return self._get(source, suffixes[-1]).copy()

    def _binary(self, suffixes: list[str], x: str, y: str, function: Callable[..., np.ndarray]) -> np.ndarray:
        a, b = self._all(suffixes, (x, y))
        with np.errstate(all="ignore"):
            return np.asarray(function(a, b)).astype(a.dtype)

    def _add(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.add)

    def _sub(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.subtract)

    def _min(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.minimum)

    def _max(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.maximum)

    def _mul(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        if suffixes[0] == "wide":
            a, b = self._all(suffixes, (x, y))
            wide = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
            return a.astype(wide) * b.astype(wide)
        if suffixes[0] == "hi":
            a, b = self._all(suffixes, (x, y))
            wide = np.dtype(f"{a.dtype.kind}8")
            return (a.astype(wide) * b.astype(wide) >> wide.type(8 * a.itemsize)).astype(a.dtype)
        a, b = (_flushed(each, suffixes) for each in self._all(suffixes, (x, y)))
        with np.errstate(all="ignore"):
            return a * b

    def _mad(self, suffixes: list[str], x: str, y: str, z: str) -> np.ndarray:
        product = self._mul(suffixes, x, y)
        with np.errstate(all="ignore"):
            return product + self._get(z, f"{suffixes[-1][0]}{8 * product.itemsize}")

    def _fma(self, suffixes: list[str], x: str, y: str, z: str) -> np.ndarray:
        a, b, c = (_flushed(each, suffixes).astype(np.float64) for each in self._all(suffixes, (x, y, z)))
        with np.errstate(over="ignore"):
            return (a * b + c).astype(np.float32)

    def _div(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        if suffixes[-1] == "f32":
            return self._binary(suffixes, x, y, np.divide)
        return self._binary(suffixes, x, y, lambda a, b: np.trunc(a / b))

    def _rem(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.fmod)

    def _abs(self, suffixes: list[str], x: str) -> np.ndarray:
        return np.abs(self._get(x, suffixes[-1]))

    def _neg(self, suffixes: list[str], x: str) -> np.ndarray:
        return -self._get(x, suffixes[-1])

    def _sqrt(self, suffixes: list[str], x: str) -> np.ndarray:
        return np.sqrt(self._get(x, suffixes[-1]))

    def _rcp(self, suffixes: list[str], x: str) -> np.ndarray:
        return 1 / self._get(x, suffixes[-1])

    def _ex2(self, suffixes: list[str], x: str) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.exp2(self._get(x, suffixes[-1]))

    def _lg2(self, suffixes: list[str], x: str) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.log2(self._get(x, suffixes[-1]))

    def _cvt(self, suffixes: list[str], x: str, y: str = "") -> np.ndarray:
        to, source = _type(suffixes[-2]), self._get(x, suffixes[-1])
        with np.errstate(all="ignore"):
            if suffixes[-2] == "f16x2":  # the first operand becomes the high half
                halves = [self._get(each, "f32").astype(np.float16).view(np.uint16) for each in (y, x)]
                return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << 16
            if suffixes[-2] == "f32" and suffixes[-1] == "bf16":
                return (self._get(x, "u16").astype(np.uint32) << 16).view(np.float32)
            if "rn" not in suffixes and to.kind != "f" and source.dtype.kind == "f":
                return np.trunc(source).astype(to)
            converted = source.astype(to)
            return (
                converted.astype(f"{to.kind}2") if to.itemsize == 1 else converted
            )  # there are no registers of 8 bits

    # --- bits

    def _and(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.bitwise_and)

    def _or(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.bitwise_or)

    def _xor(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        return self._binary(suffixes, x, y, np.bitwise_xor)

    def _not(self, suffixes: list[str], x: str) -> np.ndarray:
        return ~self._get(x, suffixes[-1])

    def _shl(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        source = self._get(x, suffixes[-1])
        return source << self._get(y, "u32").astype(source.dtype)

    def _shr(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        source = self._get(x, suffixes[-1])
        return source >> self._get(y, "u32").astype(source.dtype)

    def _shf(self, suffixes: list[str], low: str, high: str, count: str) -> np.ndarray:
        assert suffixes[1:] == ["wrap", "b32"]
        both = self._get(low, "u32").astype(np.uint64) | self._get(high, "u32").astype(np.uint64) << np.uint64(32)
        by = (self._get(count, "u32") & 31).astype(np.uint64)
        shifted = both << by >> np.uint64(32) if suffixes[0] == "l" else both >> by
        return shifted.astype(np.uint32)

    def _bfe(self, suffixes: list[str], x: str, first: str, count: str) -> np.ndarray:
        source, low, bits = self._get(x, suffixes[-1]), int(first, 0), int(count, 0)
        width = 8 * source.itemsize
        return source << (width - low - bits) >> (width - bits)

    def _prmt(self, suffixes: list[str], x: str, y: str, chosen: str) -> np.ndarray:
        both = np.stack((self._get(x, "u32"), self._get(y, "u32")), axis=1).view(np.uint8)
        selector = self._get(chosen, "u32")
        picked = [both[LANES, selector >> 4 * i & 7] for i in range(4)]
        assert not (selector & 0x8888).any(), "signs are not replicated"
        return np.stack(picked, axis=1).copy().view(np.uint32).reshape(32)

    # --- predicates

    def _setp(self, suffixes: list[str], x: str, y: str) -> np.ndarray:
        a, b = self._all(suffixes, (x, y))
        names = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
        return getattr(np, names.get(suffixes[0], {"eq": "equal", "ne": "not_equal"}.get(suffixes[0], "")))(a, b)

    def _selp(self, suffixes: list[str], x: str, y: str, predicate: str) -> np.ndarray:
        return np.where(self.registers[predicate], *self._all(suffixes, (x, y)))

    # --- between lanes

    def _shfl(self, suffixes: list[str], x: str, lane: str, clamp: str, members: str) -> np.ndarray:
        assert (int(clamp, 0), int(members, 0)) == (31, -1)
        by = self._get(lane, "u32").astype(int)
        return self._get(x, "b32")[LANES ^ by if suffixes[1] == "bfly" else by]

    def _movmatrix(self, suffixes: list[str], x: str) -> np.ndarray:
        matrix = self._get(x, "u32").copy().view(np.uint16).reshape(8, 8)
        return matrix.T.copy().reshape(32, 2).view(np.uint32).reshape(32)

    def _mma(self, suffixes: list[str], a: str, b: str, c: str) -> list[np.ndarray]:
        dtype, each = (np.int8, 4) if "s8" in suffixes else (np.float16, 2)
        total = np.dtype(np.int64 if dtype == np.int8 else np.float64)
        left, right = np.zeros((16, 8 * each), total), np.zeros((8 * each, 8), total)
        for i, name in enumerate(_names(a)):
            numbers = self._get(name, "u32").copy().view(dtype).reshape(32, each)
            for j in range(each):
                left[GROUP + i % 2 * 8, i // 2 * 4 * each + MEMBER * each + j] = numbers[:, j]
        for i, name in enumerate(_names(b)):
            numbers = self._get(name, "u32").copy().view(dtype).reshape(32, each)
            for j in range(each):
                right[i * 4 * each + MEMBER * each + j, GROUP] = numbers[:, j]
        product = left @ right
        kind = suffixes[-1]
        sums = [
            self._get(name, kind) + product[GROUP + i // 2 * 8, MEMBER * 2 + i % 2] for i, name in enumerate(_names(c))
        ]
        return [each_sum.astype(_type(kind)) for each_sum in sums]

    # --- memory

    def _ld(self, suffixes: list[str], operands: list[str], mask: np.ndarray) -> None:
        names, dtype = _names(operands[0]), _type(suffixes[-1])
        if suffixes[0] == "param":
            argument = self.arguments[int(operands[1].strip("[]").rsplit("_", 1)[1])]
            bits = np.float32(argument).view(np.uint32) if isinstance(argument, float) else argument
            wide = np.int64 if dtype.kind == "i" else dtype  # ld.param.s32 to 64 bits
            self.registers[names[0]] = np.full(32, bits, wide)
            return
        size = dtype.itemsize
        read = np.stack([self.registers.get(name, np.zeros(32, dtype)).view(_bits(dtype)) for name in names], axis=1)
        for lane, address in enumerate(self._addresses(operands[1]).tolist()):
            if mask[lane]:
                if suffixes[0] == "shared":
                    data = self.shared[address : address + size * len(names)]
                else:
                    data = self.memory.read(address, size * len(names))
                read[lane] = data.view(_bits(dtype))
        for name, column in zip(names, read.T, strict=True):
            self.registers[name] = column.copy()

    def _st(self, suffixes: list[str], operands: list[str], mask: np.ndarray) -> None:
        dtype = _type(suffixes[-1])
        rows = np.stack([self._get(name, suffixes[-1]) for name in _names(operands[1])], axis=1)
        for lane, address in enumerate(self._addresses(operands[0]).tolist()):
            if mask[lane]:
                data = rows[lane].astype(dtype).view(np.uint8)
                if suffixes[0] == "shared":
                    self.shared[address : address + len(data)] = data
                else:
                    self.memory.write(address, data)

    def _cp(self, suffixes: list[str], operands: list[str], mask: np.ndarray) -> None:
        if suffixes[1] == "commit_group":
            self.copies.append(self.group)
            self.group = []
            return
        if suffixes[1] == "wait_group":
            pending = int(operands[0], 0)
            while len(self.copies) > pending:
                for copy in self.copies.pop(0):
                    copy()
            return
        targets, sources, size = self._addresses(operands[0]), self._addresses(operands[1]), int(operands[2], 0)
        counts = self._get(operands[3], "u32").tolist()
        for lane in np.flatnonzero(mask).tolist():
            data = np.zeros(size, np.uint8)
            if counts[lane]:
                data[: counts[lane]] = self.memory.read(int(sources[lane]), counts[lane])

            def arrive(target: int = int(targets[lane]), data: np.ndarray = data) -> None:
                self.shared[target : target + len(data)] = data

            self.group.append(arrive)

    def _ldmatrix(self, suffixes: list[str], source: str) -> list[np.ndarray]:
        assert "x4" in suffixes
        addresses = self._addresses(source).astype(int).reshape(4, 8)
        results = []
        for rows in addresses:
            matrix = np.stack([self.shared[address : address + 16].view(np.uint16) for address in rows])
            matrix = matrix.T if "trans" in suffixes else matrix
            results.append(matrix.copy().reshape(32, 2).view(np.uint32).reshape(32))
        return results


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{} ").split(",")]


def _listed(results: Any) -> list[np.ndarray]:
    return [results] if isinstance(results, np.ndarray) else list(results)


def _bits(x: Any) -> Any:
    dtype = np.dtype(x.dtype if isinstance(x, np.ndarray) else x)
    return dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")


def _flushed(x: np.ndarray, suffixes: list[str]) -> np.ndarray:
    """Subnormal numbers as zeros, if instructions say so."""
    if "ftz" not in suffixes:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
