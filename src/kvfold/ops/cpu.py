"""What the CPU kernels share: launches, arguments, and how they see a slot. numba compiles them.

Kernels run on the threads of PyTorch's OpenMP runtime. numba's own threads would compete with these for the same cores.
vLLM binds threads to cores. There, all of numba's threads would share the core of the thread that made them.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import ffi
from numba import carray, cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kvfold.format.layout import PageLayout
from kvfold.ops import segments as slot_segments
from kvfold.ops.pages import LayerPages
from kvfold.ops.segments import RULES, SegmentRow, segment_rows
from kvfold.quantizers import even
from kvfold.transforms import Transform

AFFINE, CODEBOOK, EVEN = RULES["affine"], RULES["codebook"], RULES["even"]
LANES = 8  # bytes that are unpacked at once

EXACT: dict[str, Any] = {"error_model": "numpy", "cache": True}
FAST: dict[str, Any] = {"fastmath": {"contract", "nsz", "reassoc"}, **EXACT}  # sums in another order, but a fixed one
f4, i4, u1 = np.float32, np.int32, np.uint8

# vLLM reads `__dict__` of all objects of all modules. llvmlite's library would look for a C function of that name.
getattr(ffi.lib, "_fntab", {})["__dict__"] = {}

# --- launches

COUNTERS = ("worker", "task", "tasks")  # threads that have begun, tasks that have begun, number of tasks
WORKER, TASK = range(2)


def arguments(*integers: str, floats: tuple[str, ...] = ()) -> type[ctypes.Structure]:
    """The arguments of kernels: the counters of a launch, then numbers and addresses, by name.

    numba compiles a kernel anew if the kernel's own file or its arguments change. Kernels also use shared files. So one
    argument is named after the contents of these.
    """
    shared = b"".join(Path(file).read_bytes() for file in (__file__, slot_segments.__file__, even.__file__))
    source = f"source_{crc32(shared)}"
    numbers = dict.fromkeys((*COUNTERS, *integers), ctypes.c_int64) | dict.fromkeys((*floats, source), ctypes.c_double)
    return type("Arguments", (ctypes.Structure,), {"_fields_": [*numbers.items()]})


class Kernel:
    """A compiled function of a pointer to arguments. Every thread runs it, and takes tasks until none is left."""

    def __init__(self, arguments: type[ctypes.Structure], function: Callable) -> None:
        record = from_dtype(np.dtype(arguments))
        self.address = cfunc(types.void(types.CPointer(record)), **EXACT)(function).address

    def __call__(self, told: Any, tasks: int) -> None:
        told.worker, told.task, told.tasks = 0, 0, tasks
        _parallel()(self.address, ctypes.byref(told), min(tasks, torch.get_num_threads()), 0)


def kernel(arguments: type[ctypes.Structure]) -> Callable[[Callable], Kernel]:
    return partial(Kernel, arguments)


@lru_cache
def _parallel() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of PyTorch's OpenMP runtime, or None."""
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


@intrinsic
def take(typing, arguments, counter):
    """The next number of a counter, atomically."""

    def build(context, builder, signature, values):
        counters = builder.bitcast(values[0], ir.IntType(64).as_pointer())
        at = builder.gep(counters, [values[1]])
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(arguments, types.int64), build


@intrinsic
def _pointer(typing, address):
    def build(context, builder, signature, values):
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@njit(**EXACT)
def array(address, shape, dtype):
    """The array at this address."""
    return carray(_pointer(address), shape, dtype)


# --- slots

SEGMENT = np.dtype([(name, "i8") for name in SegmentRow._fields])
SIDE = np.dtype([("segments", "i8"), ("clip", "f8")])  # clip: 0 for none
PAGES = ("pool", "pool_bytes", "page_stride", "head_stride", "sides", "segments", "most", "half")


def unsupported(layout: PageLayout) -> str | None:
    """Why no kernel reads and writes pages of this layout, or None."""
    if _parallel() is None:
        return "this PyTorch does not use an OpenMP runtime that kvfold knows"
    for side, slot in (("keys", layout.key), ("values", layout.value)):
        if reason := slot.more_than_a_token or slot.misaligned:
            return f"there is no kernel for these {side}: {reason}"
    return None


def described(pages: LayerPages) -> tuple[int, ...]:
    """The pages of a layer as kernels see them, in the order of `PAGES`."""
    sides, segments = _sides(pages.layout, *(codec.clip or 0.0 for codec in (pages.key, pages.value)))
    pool, half = pages.pool, pages.key.raw_dtype == torch.float16
    tables = sides.data_ptr(), segments.data_ptr(), segments.shape[1]
    return pool.data_ptr(), pool.nbytes, *pool.stride()[:2], *tables, half


@lru_cache
def _sides(layout: PageLayout, *clips: float) -> tuple[Tensor, Tensor]:
    """SIDE[2] and SEGMENT[2, most segments of a side]."""
    slots = layout.key, layout.value
    sides, segments = np.zeros(2, SIDE), np.zeros((2, max(len(slot.segments) for slot in slots)), SEGMENT)
    for i, slot in enumerate(slots):
        sides[i] = len(slot.segments), clips[i]
        for j, row in enumerate(segment_rows(layout, i)):
            segments[i, j] = row
    # as tensors, which give their address faster than arrays
    return torch.from_numpy(sides.view(np.int64)), torch.from_numpy(segments.view((np.int64, SEGMENT.itemsize // 8)))


def _lanes(add: bool) -> Any:
    @intrinsic
    def unpack(typing, source, i, mask, unit, offset, target, j):
        """target[j : j + LANES] = unit · (source[i : i + LANES] & mask) + offset. With `add`, target replaces offset.

        Vectorised by hand: the compiler cannot tell that the arrays do not overlap.
        """

        def build(context, builder, signature, values):
            def at(argument, index, element):
                data = context.make_array(signature.args[argument])(context, builder, values[argument]).data
                return builder.bitcast(builder.gep(data, [values[index]]), ir.VectorType(element, LANES).as_pointer())

            def spread(number):
                empty, first = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), ir.IntType(32)(0)
                places = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                return builder.shuffle_vector(builder.insert_element(empty, number, first), empty, places)

            packed, sums = builder.load(at(0, 1, ir.IntType(8)), align=1), at(5, 6, ir.FloatType())
            codes = builder.uitofp(builder.and_(packed, spread(values[2])), ir.VectorType(ir.FloatType(), LANES))
            scaled = builder.fmul(codes, spread(values[3]), flags=("contract",))
            onto = builder.load(sums, align=4) if add else spread(values[4])
            builder.store(builder.fadd(scaled, onto, flags=("contract",)), sums, align=4)
            return context.get_dummy_value()

        return types.void(source, i, types.uint8, types.float32, types.float32, target, j), build

    return unpack


_unpack_first, _unpack_more = _lanes(add=False), _lanes(add=True)


@njit(**FAST, forceinline=True)
def _unpack_plane(pool, byte, stored, width, below, scale, offset, row):
    """Add scale·2^below · the bits of a plane to row. The first plane, with below = 0, sets row to offset + this."""
    run = stored * width // 8
    whole = run // LANES * LANES
    for part in range(8 // width):
        unit, mask = scale * f4(1 << below) / f4(1 << part * width), u1(((1 << width) - 1) << part * width)
        to = part * run
        if below == 0:
            for j in range(0, whole, LANES):
                _unpack_first(pool, byte + j, mask, unit, offset, row, to + j)
        else:
            for j in range(0, whole, LANES):
                _unpack_more(pool, byte + j, mask, unit, offset, row, to + j)
        for j in range(whole, run):
            row[to + j] = unit * f4(pool[byte + j] & mask) + (offset if below == 0 else row[to + j])


@njit(**FAST, forceinline=True)
def _unpack(pool, byte, stored, bits, scale, offset, row):
    """row = scale·code + offset for the codes from `byte` on, plane by plane (see packing.py)."""
    if bits == 8:
        _unpack_plane(pool, byte, stored, 8, 0, scale, offset, row)
    if bits & 4:
        _unpack_plane(pool, byte, stored, 4, 0, scale, offset, row)
    if bits & 2:
        below = bits & 4
        _unpack_plane(pool, byte + stored * below // 8, stored, 2, below, scale, offset, row)
    if bits & 1:
        below = bits & 6
        _unpack_plane(pool, byte + stored * below // 8, stored, 1, below, scale, offset, row)


@njit(**FAST, forceinline=True)
def read(pool, words, page, place, side, segments, levels, half, rows):
    """Decode successive slots of a side into rows, from offset `place` of the page on. The page begins at byte `page`.

    Rows have room for seven more coordinates: codes of codebooks are padded to whole bytes.
    """
    for s in range(side.segments):
        segment = segments[s]
        byte, meta = segment_at(segment, page, place)
        for i in range(len(rows)):
            part, entry = rows[i, segment.start :], meta // 2
            if segment.rule == EVEN:
                scale = scale_of(pool[meta])
                middle = f4(f4((1 << segment.bits) - 1) / f4(2))
                _unpack(pool, byte, segment.stored, segment.bits, scale, -middle * scale, part)
            elif segment.rule == AFFINE:
                scale, offset = widened(words[entry], True), widened(words[entry + 1], True)
                _unpack(pool, byte, segment.stored, segment.bits, scale, offset, part)
            elif segment.rule == CODEBOOK:
                norm, table = widened(words[entry], True), levels[1 << segment.bits :]
                _unpack(pool, byte, segment.stored, segment.bits, f4(1), f4(0), part)
                for j in range(segment.dims):
                    part[j] = norm * table[i4(part[j])]
            else:
                widen(words[byte // 2 : byte // 2 + segment.dims], half, part)
            byte += segment.code_stride
            meta += segment.meta_stride


@njit(**EXACT)
def segment_at(segment, page, place):
    """The first bytes of the codes and of the metadata of the slot at offset `place` of the page."""
    return page + segment.codes + place * segment.code_stride, page + segment.meta + place * segment.meta_stride


@njit(**EXACT)
def scale_of(byte):
    """An 8-bit scale (see quantizers/even.py)."""
    return i4((np.int64(byte) + even.LEAST) << even.DROPPED).view(np.float32) if byte >> even.MANTISSA else f4(0)


# --- 16-bit numbers


@njit(**EXACT)
def widened(word, half):
    """The float16 (`half`) or bfloat16 with these bits, as float32. Infinity and NaN are not handled."""
    bits = np.int64(word)
    if half:
        magnitude = i4((bits & 0x7FFF) << 13).view(np.float32) * f4(2.0**112)
        return -magnitude if bits & 0x8000 else magnitude
    return i4(bits << 16).view(np.float32)


@njit(**EXACT)
def widen(words, half, row):
    for j in range(len(words)):
        row[j] = widened(words[j], half)


@njit(**EXACT)
def narrowed(x, half):
    """The bits of the nearest float16 or bfloat16, ties to even. NaN and numbers that are too large give infinity."""
    bits = np.int64(f4(x).view(np.int32))
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    drop, rebias = (13, 112 << 23) if half else (16, 0)
    if half and magnitude < 113 << 23:  # subnormal: multiples of 2^-24, as float32 numbers from 0.5 to 1 are
        nearest = np.int64(f4(abs(x) + f4(0.5)).view(np.int32)) - (126 << 23)
    else:
        nearest = (magnitude - rebias + (1 << drop - 1) - 1 + (magnitude >> drop & 1)) >> drop
    return np.uint16(sign | min(nearest, 0x7C00 if half else 0x7F80))


@njit(**EXACT)
def finite(word, half):
    mask = 0x7C00 if half else 0x7F80
    return word & mask != mask


# --- transforms


class Dense(NamedTuple):
    """A transform in tensors. A missing mean or rotation is a tensor without elements, whose address is 0."""

    mean: Tensor  # float32[kv_heads, d]
    matrix: Tensor  # of `Rotation.apply`, float64[kv_heads or 1, d, d]
    dual: Tensor  # the same of `Rotation.dual`
    factors: Tensor  # of the columns of both, float64[d]
    inverse: Tensor  # with its factors


def dense(transform: Transform, dims: int) -> Dense:
    return transform.once(_dense, dims)


def _dense(transform: Transform, dims: int) -> Dense:
    mean = torch.empty(0) if transform.mean is None else transform.mean.float().contiguous()
    if transform.rotation is None:
        none = torch.empty(0, dims, dims, dtype=torch.float64)
        return Dense(mean, none, none, none[:, 0], none)
    matrix, duals, factors = transform.rotation.terms(dims, torch.float64, mean.device)
    dual = torch.stack(duals).sum(dim=0)
    return Dense(mean, matrix, dual, factors, (dual * factors).mT.contiguous())


@njit(**EXACT)
def rotate(x, matrices, head, factors, row):
    """row = factors·x·A, in float64 as transforms compute it: the bytes of a token may not depend on other tokens."""
    if len(matrices) == 0:
        row[:] = x
        return
    matrix = matrices[head % len(matrices)]
    sums, rows = np.zeros(len(x)), 4  # four rows are added at once
    for i in range(0, len(x) // rows * rows, rows):
        x0, x1, x2, x3 = np.float64(x[i]), np.float64(x[i + 1]), np.float64(x[i + 2]), np.float64(x[i + 3])
        for j in range(len(x)):
            sums[j] += x0 * matrix[i, j] + x1 * matrix[i + 1, j] + x2 * matrix[i + 2, j] + x3 * matrix[i + 3, j]
    for i in range(len(x) // rows * rows, len(x)):
        for j in range(len(x)):
            sums[j] += np.float64(x[i]) * matrix[i, j]
    for j in range(len(x)):
        row[j] = f4(sums[j] * factors[j])
