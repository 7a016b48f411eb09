"""The kernels of steps, compiled as they would be launched on GPUs that are not here.

That is done by a process of its own: in Triton's interpreter, which is on in tests without a GPU, nothing can be
compiled.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvfold.bench import selftest
from kvfold.bench.selftest import Tokens
from kvfold.bench.targets import parse
from kvfold.format.layout import PageLayout
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.attend.gluon.decode_step import QUERIES, _kernel
from kvfold.ops.cards import card_of
from kvfold.ops.dispatch import choose

DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Step(NamedTuple):
    """A step of one layer on one GPU: of two sequences that decode, or of two prompts."""

    target: str
    recipe: str
    head_dim: int
    ratio: int  # query heads per KV head
    page: int = 64
    only: tuple[str, ...] = ()  # of its kernels; none: all
    queries: int = 1  # per sequence

    @property
    def decodes(self) -> bool:
        return self.queries <= QUERIES


@dataclass(frozen=True)
class Compiled:
    step: Step
    kernel: str
    ptx: str
    warps: int
    shared: int  # bytes per CTA
    registers: int  # per thread
    stack: int  # bytes per thread
    ctas: int | None  # of `decode`, that are launched per SM


def compile_all(steps: list[Step]) -> list[Compiled]:
    """Every kernel of these steps once per target."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", __file__, json.dumps(steps)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    rows = json.loads(run.stdout.splitlines()[-1])
    return [Compiled(**{**row, "step": Step(*row["step"])}) for row in rows]


class _Compiler:
    """Compiles what is launched, and launches nothing."""

    def __init__(self) -> None:
        self.rows: dict[str, Compiled] = {}

    def add(self, step: Step) -> None:
        new = step.queries, step.queries
        case = selftest.Case(step.recipe, step.head_dim, step.ratio, step.page, Tokens((100, 90), new))
        layer = selftest.Layer(case, torch.device("cpu"))
        layout, capability = layer.pages.layout, parse(step.target)
        self.step, self.ctas = step, _kernel(layout, card_of(capability), step.queries > 1).warps
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        ops = choose(PageLayout(layout.key, layout.value, step.page), step.ratio, torch.device("cuda"), capability)
        layer.begin(new)
        q = layer.queries()
        ops.store_and_attend(layer.pages, q, layer.k, layer.v, layer.logits, torch.empty_like(q))

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name, backend = kernel.fn.__name__, make_backend(self.target)
        if self.step.only and name not in self.step.only:
            return
        options = {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False, **options}
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = bind(*args, **options)
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=self.target, options=parsed.__dict__)
        if compiled.hash in self.rows:
            return
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [DUMP, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = {what: int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK", "LOCAL")}
        about = compiled.metadata
        self.rows[compiled.hash] = Compiled(
            self.step, name, compiled.asm["ptx"], about.num_warps, about.shared, used["REG"],
            used["STACK"] + used["LOCAL"], self.ctas if name == "decode" else None,
        )  # fmt: skip


if __name__ == "__main__":
    compiler = _Compiler()
    JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)
    # as on a GPU, but for flash attention itself
    unpacked._operand = lambda device, dtype: dtype
    unpacked._torch_attention = lambda q, *_: unpacked.Part(torch.empty_like(q), torch.empty(q.shape[:2]))
    for step in json.loads(sys.argv[1]):
        compiler.add(Step(*step))
    print(json.dumps([asdict(row) for row in compiler.rows.values()]))
