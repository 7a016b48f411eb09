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
from kvfold.ops.attend.gluon.decode_step import _kernel, _shape
from kvfold.ops.cards import card_of
from kvfold.ops.pdl import ALONE, Overlap

KEYS = {
    2: [(32, 4), (64, 2), (32, 1)],
    3: [(64, 4), (32, 2), (32, 1)],
    4: [(32, 8), (32, 4), (64, 2)],
}
VALUES = {2: [(128, 2)], 3: [(64, 4), (64, 2)], 4: [(128, 4)]}


class Case(NamedTuple):
    bits: int  # of KEYS and VALUES, or of all coordinates
    ratio: int
    page: int
    capability: tuple[int, int]
    block: int = 0
    doubled: bool = False  # twice the coordinates
    queries: int = 1  # of a sequence, at most
    rule: str = "even"

    @property
    def layout(self) -> PageLayout:
        if self.rule != "even":
            slot = codebook_slot([(128, self.bits)]) if self.rule == "codebook" else affine_slot(128, self.bits)
            return PageLayout(slot, slot, self.page)
        by = 1 + self.doubled
        key, value = (even_slot([(by * dims, bits) for dims, bits in side[self.bits]]) for side in (KEYS, VALUES))
        return PageLayout(key, value, self.page)


CASES = [
    Case(2, 4, 64, (9, 0)),
    Case(2, 8, 16, (8, 0), block=16),
    Case(3, 3, 64, (8, 6), block=64),
    Case(3, 7, 16, (9, 0)),
    Case(4, 1, 128, (8, 9), block=128),
    Case(2, 2, 32, (8, 0), block=5, doubled=True),
]
SEVERAL = [
    Case(4, 4, 64, (9, 0), block=64, queries=4),
    Case(4, 4, 16, (8, 0), block=2, queries=7, rule="affine"),  # two CTAs share them
    Case(3, 8, 64, (8, 9), queries=2, rule="codebook"),
    Case(2, 2, 16, (8, 0), block=16, queries=3, rule="codebook"),
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
    layout, card = case.layout, card_of(case.capability)
    kernel = _kernel(layout, card, case.queries > 1)
    overlap = Overlap("start", "end") if card.overlaps else ALONE
    constants = {
        "KEY": kernel.key, "VALUE": kernel.value, "DIMS": layout.key.dims, "PAGE": layout.page_size,
        "PAGE_WORDS": layout.page_bytes // 4, "RATIO": case.ratio, **_shape(layout, case.ratio, case.queries),
        "ORDER": 1, "BLOCK": case.block, "SHARED": card.shared, "OVERLAP": overlap,
    }  # fmt: skip
    if case.queries == 1:
        constants |= {"query_starts": None, "tokens": None, "groups": None}
    types = {"q": "*fp32", "outs": "*fp32", "weights": "*fp32", "pool": "*i32", "table": "*i64", "lengths": "*i32"}
    types["query_starts"] = "*i32"
    names = kernel.decode.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "fp32" if name in ("scale", "unit") else "i32")
        for name in names
    }
    source = GluonASTSource(
        fn=kernel.decode,
        signature=signature,
        constexprs={(names.index(name),): x for name, x in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("q", "outs", "weights", "pool")},
    )
    options, (major, minor) = {"num_warps": 1, "maxnreg": kernel.registers, **overlap.launch}, case.capability
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


if __name__ == "__main__":
    for number, case in enumerate(CASES + SEVERAL):
        kernel, path = _compile(case), Path(sys.argv[1]) / str(number)
        path.with_suffix(".ptx").write_text(kernel.asm["ptx"])
        path.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])
        path.with_suffix(".json").write_text(json.dumps(kernel.metadata.shared))
