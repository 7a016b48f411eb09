"""The kernels of decode steps and of prompts fit on GPUs that are not here: as compiled for them, and as NVIDIA states
their sizes."""

import re

import pytest
from compiled_steps import Compiled, Step, compile_all

from kvfold.bench.targets import parse
from kvfold.ops.cards import card_of

pytestmark = pytest.mark.timeout(7200)  # with --whole-product

# KiB of shared memory per SM and per CTA at most, from the CUDA programming guide
SHARED = {
    "sm_80": (164, 163),
    "sm_86": (100, 99),
    "sm_89": (100, 99),
    "sm_90": (228, 227),
    "sm_100": (228, 227),
    "sm_120": (100, 99),
}
REGISTERS = 65536  # of an SM
OWN = 1024  # bytes of shared memory that a CTA takes beside what it asks for
NEWER = {  # instructions and types, and the first compute capability that has them
    r"griddepcontrol|wgmma|cp\.async\.bulk|tensormap|mbarrier\.try_wait|setmaxnreg|elect\.sync|\.cluster": (9, 0),
    r"e4m3|e5m2": (8, 9),
    r"tcgen05": (10, 0),
}
SPILLED = {  # bytes per thread, at most: docs/gpus.md says why
    ("decode", "tq-k4v4", 256): 80,
    ("decode", "fold4", 256): 8,
    ("decode", "gtq-k2v2", 128): 24,
    ("_store", "gtq-k2v2", 128): 88,
    ("_store", "gtq-k3v3", 64): 16,
    ("_store", "fold4", 256): 56,
    ("_store", "saw-int4:values=true,block=64", 256): 176,
    ("_store", "oscar-int2", 256): 136,
    ("_store", "int8", 128): 32,
    ("_store", "saw-int4", 128): 56,
    ("_dequantize", "gtq-k2v2", 128): 16,
    ("_dequantize", "gtq-k3v3", 64): 40,
    ("_attend", "saw-int4", 128): 168,
    ("_attend", "gtq-k2v2", 128): 1088,
    ("_attend", "gtq-k3v3", 64): 56,
}
SPILLED_BY_SEVERAL = 112  # the same, of kernels for several queries per sequence
SHORT, LONG = 40, 4100  # prompts that the portable kernel reads, and that are unpacked
LAYOUTS = [  # all of them with --whole-product
    ("saw-int4", 128),
    ("saw-int4:values=true,block=64", 256),
    ("oscar-int2", 128),
    ("oscar-int2", 256),
    ("oscar-int2:group=128", 128),
    ("int2", 64),
    ("int4:group=32", 64),
    ("int8", 128),
    ("int8", 256),
    ("fold2", 128),
    ("fold3", 128),
    ("fold4", 128),
    ("fold4", 256),
    ("gtq-k2v2", 128),
    ("gtq-k3v3", 64),
    ("tq-k4v4", 256),
]
DECODE = ("decode",)
STEPS = [  # test_gluon_even.py has more of evenly spaced levels
    Step("sm_80", "saw-int4", 128, 4),
    Step("sm_80", "oscar-int2", 128, 8),
    Step("sm_80", "gtq-k2v2:block=16", 64, 4),
    Step("sm_86", "saw-int4:values=true,block=64", 256, 4),
    Step("sm_86", "oscar-int2:group=128", 128, 4, 16, DECODE),
    Step("sm_86", "tq-k4v4", 128, 8, 64, DECODE),
    Step("sm_89", "int8", 256, 8, 16, DECODE),
    Step("sm_90", "saw-int4", 128, 8, 64, DECODE),
    Step("sm_90", "gtq-k3v3", 64, 4, 64, DECODE),
    Step("sm_100", "oscar-int2:group=128", 128, 8),
    Step("sm_100", "tq-k4v4", 128, 4, 64, DECODE),
    Step("sm_120", "saw-int4", 128, 4),
    Step("sm_120", "fold4", 128, 4, 16, DECODE),
    Step("sm_86", "fold4", 128, 4, 16, DECODE, 4),
    Step("sm_100", "saw-int4", 128, 4, 64, DECODE, 8),
    Step("sm_80", "saw-int4", 128, 4, 64, ("_attend",), SHORT),
    Step("sm_80", "fold4", 128, 4, 64, ("_open_block",), SHORT),
    Step("sm_86", "oscar-int2:clip=false", 256, 4, 64, ("_store", "_open_block"), SHORT),
    Step("sm_90", "fold4", 128, 4, 64, ("_open_block",), SHORT),
    Step("sm_100", "fold4", 128, 4, 64, ("_open_block",), SHORT),
    Step("sm_80", "fold4", 128, 4, queries=LONG),
    Step("sm_90", "saw-int4", 128, 4, 64, ("_store", "_merge_rows"), LONG),
    Step("sm_100", "oscar-int2:group=128", 128, 4, 64, ("_store",), LONG),
    Step("sm_120", "saw-int4:values=true,block=64", 256, 4, 64, ("_dequantize", "_rotate"), LONG),
]


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> list[Compiled]:
    heads = [(4, 1), (8, 1), (4, 4), (8, 8), (4, SHORT), (4, LONG)]  # query heads per KV head, queries
    whole = [
        Step(target, *layout, ratio, queries=queries)
        for target in SHARED
        for layout in LAYOUTS
        for ratio, queries in heads
    ]
    return compile_all(whole if request.config.getoption("--whole-product") else STEPS)


def of(kernels: list[Compiled], target: str) -> list[Compiled]:
    found = [kernel for kernel in kernels if kernel.step.target == target]
    assert found
    return found


@pytest.mark.parametrize("target", SHARED)
def test_every_kernel_fits_on_an_sm_and_spills_nothing(target: str, kernels: list[Compiled]) -> None:
    for kernel in of(kernels, target):
        assert kernel.shared <= 1024 * SHARED[target][1], kernel.step
        assert 32 * kernel.warps * kernel.registers <= REGISTERS, kernel.step
        spilled = SPILLED.get((kernel.kernel, *kernel.step[1:3]), 0)
        if kernel.kernel == "decode" and kernel.step.queries > 1:
            spilled = SPILLED_BY_SEVERAL
        assert kernel.stack <= spilled, (kernel.kernel, kernel.step)


@pytest.mark.parametrize("target", SHARED)
def test_as_many_ctas_decode_on_an_sm_as_are_launched(target: str, kernels: list[Compiled]) -> None:
    shared = 1024 * SHARED[target][0]
    decoding = [kernel for kernel in of(kernels, target) if kernel.ctas]
    assert decoding
    for kernel in decoding:
        assert kernel.ctas is not None
        assert kernel.ctas * 32 * kernel.registers <= REGISTERS, kernel.step
        assert kernel.ctas * (kernel.shared + OWN) <= shared, kernel.step
        if kernel.shared:  # else what is loaded goes to registers
            assert shared < (kernel.ctas + 1) * (kernel.shared + OWN), kernel.step


@pytest.mark.parametrize("target", SHARED)
def test_kernels_have_no_instruction_of_newer_gpus(target: str, kernels: list[Compiled]) -> None:
    """The assembler has taken them for this target. Where GPUs have PDL, it is used."""
    for kernel in of(kernels, target):
        assert re.search(rf"^\.target {target}a?$", kernel.ptx, re.MULTILINE)
        for instructions, first in NEWER.items():
            if parse(target) < first:
                assert re.search(instructions, kernel.ptx) is None, (kernel.kernel, kernel.step)
        if kernel.step.decodes:
            assert ("griddepcontrol" in kernel.ptx) == (parse(target) >= (9, 0)), (kernel.kernel, kernel.step)


def test_raw_tokens_are_loaded_in_vectors(kernels: list[Compiled]) -> None:
    """Of 16 bytes. In decode steps, they lie anywhere in rings."""
    raw = [k for k in kernels if k.kernel == "_open_block" or (k.kernel == "decode" and "open_block.py" in k.ptx)]
    assert {kernel.step.decodes for kernel in raw} == {False, True}
    for kernel in raw:
        assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\S* \[[^]]*\], \[[^]]*\], 0x10", kernel.ptx), kernel.step
        assert re.search(r"ld\.global\S*b16", kernel.ptx) is None, kernel.step


def test_all_kernels_of_a_step_were_compiled(kernels: list[Compiled]) -> None:
    for target in ("sm_80", "sm_100"):
        names = {kernel.kernel for kernel in of(kernels, target) if kernel.step.decodes}
        assert names == {"decode", "_store", "_merge", "_rotate"}
    names = {kernel.kernel for kernel in kernels if not kernel.step.decodes}
    assert names >= {"_store", "_dequantize", "_merge_rows", "_rotate", "_attend", "_open_block"}


@pytest.mark.parametrize("target", SHARED)
def test_sizes_are_those_that_nvidia_states(target: str) -> None:
    card = card_of(parse(target))
    assert card.shared == 1024 * SHARED[target][0]
    assert card.overlaps == (parse(target) >= (9, 0))


PRODUCTS = {"wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma", "mma": r"\bmma\.sync"}


def test_products_are_those_that_triton_chooses(kernels: list[Compiled]) -> None:
    """Of short prompts, `_open_block` multiplies 64 rows in four warps, if heads have up to 128 dims."""
    short = [k for k in kernels if k.kernel == "_open_block" and k.step.queries == SHORT and k.step.head_dim <= 128]
    stated = [card_of(parse(kernel.step.target)).products for kernel in short]
    assert set(stated) == set(PRODUCTS)
    for kernel, products in zip(short, stated, strict=True):
        assert [name for name, found in PRODUCTS.items() if re.search(found, kernel.ptx)] == [products], kernel.step


def test_an_unknown_gpu_is_taken_for_the_smallest() -> None:
    assert card_of((15, 3)) == (1024 * min(shared for shared, _ in SHARED.values()), True, "mma")
    assert card_of((11, 0)) == (1024 * min(shared for shared, _ in SHARED.values()), True, "tcgen05")
    assert card_of((8, 3)) == (1024 * min(shared for shared, _ in SHARED.values()), False, "mma")
