"""Which implementation a layer gets: of devices, PyTorch and Triton that are not here."""

import sys
from types import ModuleType

import pytest
import torch

from kvfold.format.codec import Codec
from kvfold.format.layout import PageLayout, affine_slot, channel_slot
from kvfold.ops.cards import HOPPER
from kvfold.ops.dispatch import AMPERE, check_dtype, choose
from kvfold.ops.pages import Logits
from kvfold.paged import PagedCache
from kvfold.recipes import parse

GPU = torch.device("cuda")
INT4 = PageLayout(affine_slot(128, 4), affine_slot(128, 4), 64)
KIVI = PageLayout(channel_slot(128, 2), affine_slot(128, 2, 32), 32)


@pytest.fixture(autouse=True)
def _afresh():
    choose.cache_clear()
    yield
    choose.cache_clear()


def forget(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let them be imported again, until the test is over."""
    for name in modules:
        parent, _, child = name.rpartition(".")
        if name in sys.modules:
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(sys.modules[parent], child)


# --- vendors


@pytest.mark.parametrize("capability", [HOPPER, (9, 4), (9, 5)])
def test_gpus_of_amd_are_refused(monkeypatch, capability):
    """An MI300 says that its compute capability is (9, 4), which would be newer than Hopper."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with pytest.raises(ValueError, match=r"kernels for NVIDIA's GPUs.*ROCm 6\.4\.43482.*run the model on the CPU"):
        choose(INT4, 4, GPU, capability)
    assert choose(INT4, 4, torch.device("cpu")).store.implementation in ("numba", "torch")


@pytest.mark.parametrize("capability", [AMPERE, (8, 6), (8, 9), HOPPER, (10, 0), (12, 0), (13, 7)])
@pytest.mark.parametrize("recipe", ["saw-int4", "oscar-int2", "fold3", "gtq-k2v2"])
def test_all_gpus_since_ampere_get_the_fast_kernel(triton, recipe, capability):
    layout = PageLayout(*parse(recipe).layouts(128, 128, {}), 64)
    ops = choose(layout, 4, GPU, capability)
    assert [choice.implementation for choice in ops] == ["triton", "gluon", "unpacked"]


@pytest.mark.parametrize(("queries", "decoded"), [(1, True), (2, True), (16, True), (17, False)])
def test_the_fast_kernel_takes_a_few_queries_per_sequence(triton, queries, decoded):
    cache = PagedCache([(codec := Codec(affine_slot(128, 4)), codec)], 1, 2, page_size=64)
    cache.extend([1, queries])
    ops, cpu = (choose(INT4, 4, device, HOPPER) for device in (GPU, torch.device("cpu")))
    assert ops._attention(cache.pages(0)) is (ops.decode if decoded else ops.extend)
    assert cpu._attention(cache.pages(0)) is (cpu.decode if queries == 1 else cpu.extend)


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_on_older_gpus_pytorch_does_it_and_says_so(capability):
    """Turing has no `cp.async` and no bfloat16."""
    version = ".".join(map(str, capability))
    said = rf"the GPU has compute capability {version}, and the kernels need 8\.0, .*; PyTorch's operators do its work"
    with pytest.warns(UserWarning, match=said) as warned:
        ops = choose(INT4, 4, GPU, capability)
    assert len(warned) == 1
    assert {choice.implementation for choice in ops} == {"torch"}


def test_an_older_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.warns(UserWarning, match=r"^Tesla T4 has compute capability 7\.5"):
        choose(INT4, 4, GPU)


# --- older Triton


@pytest.fixture
def triton() -> ModuleType:
    return pytest.importorskip("triton")


KERNELS = [
    f"kvfold.ops.{name}"
    for name in ("tiles", "store.store_gpu", "attend.attend_gpu", "attend.unpacked_prefill", "dequantize_gpu")
]
GLUON = [f"kvfold.ops.attend.gluon.{name}" for name in ("decode_step", "integer_decode", "codebook_decode")]


def test_without_triton_pytorch_does_it_and_says_so(monkeypatch):
    forget(monkeypatch, *KERNELS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="need Triton 3.5 or newer, which torch 2.9 has: pip install.*times slower"):
        ops = choose(INT4, 4, GPU, HOPPER)
    assert {choice.implementation for choice in ops} == {"torch"}
    assert all("Triton 3.5" in choice.reason for choice in ops)


def test_before_triton_3_5_pytorch_does_it(monkeypatch, triton):
    """It has no functions that kernels can call while they are compiled."""
    forget(monkeypatch, *KERNELS)
    monkeypatch.delattr(triton, "constexpr_function")
    with pytest.warns(UserWarning, match="need Triton 3.5 or newer.*constexpr_function"):
        ops = choose(INT4, 4, GPU, HOPPER)
    assert {choice.implementation for choice in ops} == {"torch"}


def test_before_triton_3_6_the_portable_kernel_decodes(monkeypatch, triton):
    """Its Gluon has no products for these kernels."""
    from triton.experimental.gluon.language.nvidia import ampere

    forget(monkeypatch, *GLUON)
    monkeypatch.delattr(ampere, "mma_v2")
    with pytest.warns(UserWarning, match="portable kernel decodes.*Triton 3.6 or newer, which torch 2.10 has.*mma_v2"):
        ops = choose(INT4, 4, GPU, HOPPER)
    assert [choice.implementation for choice in ops] == ["triton", "triton", "unpacked"]


# --- head dimensions


@pytest.mark.parametrize("dims", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("recipe", ["bf16", "int8", "saw-int4", "oscar-int2", "tq-k3v3", "gtq-k3v3"])
@pytest.mark.filterwarnings("ignore:.*slower")
def test_every_usual_head_dimension_has_kernels(triton, recipe, dims):
    layout = PageLayout(*parse(recipe).layouts(dims, dims, {}), 64)
    assert "torch" not in {choice.implementation for choice in choose(layout, 4, GPU, HOPPER)}
    assert choose(layout, 4, GPU, (8, 0)).extend.implementation == "unpacked"


# --- soft-caps


@pytest.mark.parametrize("capability", [(8, 0), HOPPER])
@pytest.mark.filterwarnings("ignore:.*slower")
def test_capped_logits_are_left_to_the_portable_kernel(triton, capability):
    ops = choose(INT4, 4, GPU, capability, cap=True)
    assert [choice.implementation for choice in ops] == ["triton"] * 3
    assert ops.extend.reason == "flash attention has no soft-cap"
    if capability == HOPPER:
        assert ops.decode.reason == "logits have a soft-cap"


# --- float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_kernels_cannot_store_is_refused(triton, dtype):
    ops = [choose(INT4, 4, GPU, HOPPER)]
    with pytest.raises(ValueError, match=f"bfloat16 or float16, and the model is in {dtype}.*--dtype bfloat16"):
        check_dtype(ops, dtype)
    check_dtype(ops, torch.bfloat16)
    check_dtype(ops, torch.float16)


@pytest.mark.filterwarnings("ignore:.*slower")
def test_pytorch_stores_every_type(triton):
    check_dtype([choose(INT4, 4, torch.device("cpu"))], torch.float32)
    check_dtype([choose(KIVI, 4, GPU, HOPPER)], torch.float32)


# --- other devices


@pytest.mark.parametrize(("block", "n"), [(0, 1), (8, 1), (8, 7)])
def test_pytorch_reads_on_any_device(block, n):
    """On that of tensors without numbers; those of other devices are looked at in the same way."""
    device = torch.device("meta")
    ops = choose(INT4, 2, device)
    assert ops.decode.reason == "there are kernels for GPUs and CPUs, and the cache is on meta"
    codecs = [tuple(codec.to(device) for codec in parse("saw-int4:centre=false").codecs(128, 128, {}))]
    cache = PagedCache(codecs, 2, 2, block=block, page_size=64, device=device)
    cache.extend([70, 40])
    cache.extend([n, n])
    q, k = (torch.empty(2 * n, heads, 128, device=device) for heads in (4, 2))
    out = ops.decode.run(cache.pages(0), q, (k, k) if block else None, Logits(0.1))
    assert (out.shape, out.device) == (q.shape, device)
