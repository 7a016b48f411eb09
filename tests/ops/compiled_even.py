"""The Gluon decode kernels, compiled for several GPUs by a process of its own. In Triton's interpreter, which is on in
tests without a GPU, nothing can be compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kvfold.format.layout import PageLayout, affine_slot, codebook_slot, even_slot
from kvfold.ops.attend.gluon.decode_step import Kernel, _kernel, _shape
from kvfold.ops.attend.gluon.open_block import RingBlock
from kvfold.ops.cards import card_of
from kvfold.ops.pdl import ALONE, Overlap

KEYS = {
    1: [(64, 4), (64, 2)],
    2: [(32, 4), (64, 2), (32, 1)],
    3: [(64, 4), (32, 2), (32, 1)],
    4: [(32, 8), (32, 4), (64, 2)],
}
VALUES = {1: [(128, 2)], 2: [(128, 2)], 3: [(64, 4), (64, 2)], 4: [(128, 4)]}


class Case(NamedTuple):
    bits: int  # of KEYS and VALUES, or of all coordinates
    ratio: int
    page: int
    capability: tuple[int, int]
    block: int = 0
    ring: tuple[int, int] = (0, 0)  # blocks of a ring, and their tokens
    dims: int = 128
    queries: int = 1  # of a sequence, at most
    rule: str = "even"
    raw: str = "bf16"

    @property
    def layout(self) -> PageLayout:
        if self.rule != "even":
            slot = (
                codebook_slot([(self.dims, self.bits)])
                if self.rule == "codebook"
                else affine_slot(self.dims, self.bits)
            )
            return PageLayout(slot, slot, self.page)
        slots = ([(dims * self.dims // 128, bits) for dims, bits in side[self.bits]] for side in (KEYS, VALUES))
        return PageLayout(*map(even_slot, slots), self.page)

    @property
    def kernel(self) -> Kernel:
        return _kernel(self.layout, card_of(self.capability), self.queries > 1)

    @property
    def shape(self) -> dict[str, int]:
        return _shape(self.layout, self.ratio, self.queries)

    @property
    def near(self) -> bool:
        """Whether keys at position 0 are near something."""
        return self.bits != 3

    @property
    def block_numbers(self) -> int:
        """Of a block of a ring, per KV head: 8 of them belong to no token."""
        return 2 * self.ring[1] * self.dims + 8


CASES = [
    Case(2, 4, 64, (9, 0)),
    Case(2, 8, 16, (8, 0), 16, (2, 16)),
    Case(3, 3, 64, (8, 6), 64, (5, 17)),
    Case(3, 7, 16, (9, 0)),
    Case(4, 1, 128, (8, 9), 128, (1, 144), raw="fp16"),
    Case(2, 2, 32, (8, 0), 5, (3, 7), 256),
    Case(1, 4, 64, (9, 0), 20, (6, 6), 64),
    Case(4, 4, 64, (9, 0), 64, (1, 80), rule="affine"),
    Case(2, 4, 16, (8, 9), 8, (8, 3), 64, rule="affine"),
    Case(8, 8, 32, (8, 6), 1, (17, 1), 256, rule="affine"),
    Case(4, 4, 64, (9, 0), 100, (2, 60), 64, rule="codebook"),
    Case(3, 8, 16, (9, 0), 32, (3, 17), rule="codebook"),
]
SEVERAL = [
    Case(4, 4, 64, (9, 0), 64, (5, 17), queries=4),
    Case(4, 4, 16, (8, 0), 2, (2, 9), queries=7, rule="affine"),  # two CTAs share them
    Case(3, 8, 64, (8, 9), queries=2, rule="codebook"),
    Case(2, 2, 16, (8, 0), 16, (4, 8), 256, queries=3, rule="codebook"),
]


class Compiled(NamedTuple):
    ptx: str
    cubin: Path
    shared: int  # bytes of shared memory

    @classmethod
    def load(cls, folder: Path, number: int) -> "Compiled":
        shared = json.loads((folder / f"{number}.json").read_text())
        return cls((folder / f"{number}.ptx").read_text(), folder / f"{number}.cubin", shared)


def compile_all(folder: Path) -> list[Compiled]:
    """The kernels of CASES and SEVERAL."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder)], check=True, env=environment)
    return [Compiled.load(folder, number) for number in range(len(CASES + SEVERAL))]


def _compile(case: Case) -> Any:
    """The kernel as `decode_step` would launch it."""
    layout, card, kernel = case.layout, card_of(case.capability), case.kernel
    overlap = Overlap("start", "end") if card.overlaps else ALONE
    ring = RingBlock(case.ring[1], case.block_numbers) if case.block else None
    constants = {
        "KEY": kernel.key, "VALUE": kernel.value, "DIMS": case.dims, "PAGE": layout.page_size,
        "PAGE_WORDS": layout.page_bytes // 4, "RATIO": case.ratio, **case.shape, "ORDER": 1, "BLOCK": case.block,
        "RING": ring, "SHARED": card.shared, "OVERLAP": overlap,
    }  # fmt: skip
    if case.queries == 1:
        constants |= {"query_starts": None, "tokens": None, "groups": None, "starts": None}
    if not case.block:
        constants |= {"ring": None, "rings": None, "ring_stride": None, "ring_blocks": None, "starts": None}
    if not case.near:
        constants |= {"near": None}
    types = {
        "q": "*fp32",
        "near": "*fp32",
        "outs": "*fp32",
        "weights": "*fp32",
        "pool": "*i32",
        "table": "*i64",
        "lengths": "*i32",
    }
    types |= {"query_starts": "*i32", "ring": f"*{case.raw}", "rings": "*i64", "starts": "*i32"}
    types |= {"scale": "fp32"}
    names = kernel.decode.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in ("q", "outs", "weights", "pool", "ring") if name not in constants]
    source = GluonASTSource(
        fn=kernel.decode,
        signature=signature,
        constexprs={(names.index(name),): x for name, x in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options, (major, minor) = {"num_warps": 1, "maxnreg": kernel.registers, **overlap.launch}, case.capability
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


if __name__ == "__main__":
    for number, case in enumerate(CASES + SEVERAL):
        kernel, path = _compile(case), Path(sys.argv[1]) / str(number)
        path.with_suffix(".ptx").write_text(kernel.asm["ptx"])
        path.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])
        path.with_suffix(".json").write_text(json.dumps(kernel.metadata.shared))
