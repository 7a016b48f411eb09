"""Packed pages that leave the device: to host memory, to files, and for good with a memory saver."""

import errno
import hashlib
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import sglang
import torch
from defined_attention import Found, defined_attention
from prometheus_client import REGISTRY
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang_engine import Answer, ask_alone, forget, serve
from test_plugin import DIMS, KV_HEADS, MODEL, PAGE, RATIO, backend, reading
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.engines.sglang import hierarchical_cache
from kvfold.engines.sglang.packed_host_pool import PackedHostPool
from kvfold.engines.sglang.packed_pool import PackedPool
from kvfold.engines.sglang.page_copies import copy_pages
from kvfold.geometry import Geometry

# Stand-ins


def hash_in_python() -> None:
    """Where SGLang's tree hashes in Rust, this part compiles a C++ module for it, which takes half a minute."""

    def get_hash(tokens: Any, count: int, width: int, bigram: bool, digest: bytes | None, page: int) -> list[str]:
        found = []
        for start in range(0, count, page):
            words = array("I", tokens[start : start + page]).tobytes()
            digest = hashlib.sha256((digest or b"") + words).digest()
            found.append(digest.hex())
        return found

    native_hash._load_native_hash_module = lambda: SimpleNamespace(get_hash=get_hash)


def take_all_memory() -> None:
    """SGLang leaves 10 GiB of the host's memory to others."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


class Made(TorchDispatchMode):
    """The tensors that are made meanwhile."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if not any(isinstance(argument, Tensor) for argument in arguments):
            self.tensors.append(result)
        return result


class Saver(TorchMemorySaverAdapter):
    """A memory saver for CPUs: what is made in a region has lost its contents after a pause."""

    regions: ClassVar[dict[str, list[Tensor]]] = {}
    enabled = True

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with Made(self.regions.setdefault(tag, [])):
            yield

    def pause(self, tag: str) -> None:
        for tensor in self.regions.get(tag, []):
            tensor.view(torch.uint8).fill_(0xA5)

    def resume(self, tag: str) -> None:
        pass

    def configure_subprocess(self) -> Any:
        return nullcontext()

    def disable(self) -> Any:
        return nullcontext()


def save_memory() -> None:
    TorchMemorySaverAdapter.create = staticmethod(lambda enable: Saver())


# Pages in host memory


@pytest.fixture(params=["", ",block=16"])
def pools(request, monkeypatch) -> tuple[PackedPool, PackedHostPool]:
    """Two layers of different sizes, with random bytes."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    pool = backend(f"int4:centre=false,skip=0{request.param}", config=MODEL | {"num_hidden_layers": 2}).pool
    for rows in pool.rows:
        rows.random_(256)
    return pool, PackedHostPool(pool, 2.0, 0, PAGE, "page_first", allocator_type="default")


def tokens_of(pages: list[int]) -> Tensor:
    return (torch.tensor(pages).unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()


@pytest.mark.parametrize("kernel", [False, True])
def test_pages_come_back_with_the_same_bytes(kernel, pools):
    """From host memory, and from what is stored of it; other pages do not change."""
    pool, host = pools
    host.pin_memory = kernel  # as on a GPU
    before = [rows.clone() for rows in pool.rows]
    assert len({rows.shape[1] for rows in before}) == 2
    assert host.size_per_token * PAGE == sum(rows.shape[1] for rows in before)
    left, kept, elsewhere, back = [3, 1, 20], [40, 7, 8], [2, 47, 9], [5, 3, 11]
    host.backup_from_device_all_layer(pool, tokens_of(kept), tokens_of(left), "kernel")
    for page, other in zip(kept, elsewhere, strict=True):
        stored = host.get_data_page(page * PAGE)
        assert stored.shape == host.get_dummy_flat_data_page().shape
        host.set_from_flat_data_page(other * PAGE, stored.clone())
    for layer in range(2):
        host.load_to_device_per_layer(pool, tokens_of(elsewhere), tokens_of(back), layer, "kernel")
    for rows, old in zip(pool.rows, before, strict=True):
        expected = old.clone()
        expected[back] = old[left]
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("size", [64, 16 * 1000])
def test_the_kernel_copies_pages_of_all_layers(size):
    generator = torch.Generator().manual_seed(0)
    sources, targets = torch.randint(256, (2, 3, 6, size), dtype=torch.uint8, generator=generator)
    addresses = [torch.tensor([layer.data_ptr() for layer in layers]) for layers in (sources, targets)]
    expected = targets.clone()
    expected[:, [4, 0]] = sources[:, [1, 5]]
    copy_pages(*addresses, size, torch.tensor([1, 5]), torch.tensor([4, 0]))
    assert torch.equal(targets, expected)


@contextmanager
def moves_are_known(found: Found) -> Iterator[None]:
    """Let the definition of attention know which pages went where."""
    load, save, away = PackedHostPool.load_to_device_per_layer, PackedHostPool.backup_from_device_all_layer, {}

    def pages(tokens: Tensor) -> list[int]:
        return (tokens[::PAGE] // PAGE).tolist()

    def saved(host: Any, pool: Any, host_tokens: Tensor, tokens: Tensor, *arguments: Any) -> None:
        save(host, pool, host_tokens, tokens, *arguments)
        for layer, record in found.records.items():
            for to, page in zip(pages(host_tokens), pages(tokens), strict=True):
                away[layer, to] = tuple(side.clone() for side in record.states[page])

    def loaded(host: Any, pool: Any, host_tokens: Tensor, tokens: Tensor, number: int, *arguments: Any, **o: Any):
        load(host, pool, host_tokens, tokens, number, *arguments, **o)
        for layer, record in found.records.items():
            for page, at in zip(pages(tokens), pages(host_tokens), strict=True):
                record.states[page] = tuple(side.clone() for side in away[layer, at])

    with patch.multiple(PackedHostPool, backup_from_device_all_layer=saved, load_to_device_per_layer=loaded):
        yield


@pytest.mark.usefixtures("_poisoned_memory")
def test_pages_from_host_memory_need_nothing_raw(monkeypatch):
    """The ring of the request that goes on after them holds NaN."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    own = backend("int4:centre=false,block=16")
    layer = RadixAttention(KV_HEADS * RATIO, DIMS, DIMS**-0.5, KV_HEADS, layer_id=0)
    generator = torch.Generator().manual_seed(0)

    def read(row: int, pages: list[int], start: int, end: int) -> None:
        own.req_to_token[row, : len(pages) * PAGE] = tokens_of(pages)
        batch = reading(own, [row], [start], [end])
        own.init_forward_metadata(batch)
        q, k, v = (torch.randn(end - start, n, DIMS, generator=generator) for n in (KV_HEADS * RATIO, *[KV_HEADS] * 2))
        own.forward_extend(q, k, v, layer, batch)

    with defined_attention() as found, moves_are_known(found):
        host = PackedHostPool(own.pool, 2.0, 0, PAGE, "page_first", allocator_type="default")
        read(1, [5, 9, 2], 0, 37)
        host.backup_from_device_all_layer(own.pool, tokens_of([4, 3]), tokens_of([5, 9]), "kernel")
        host.load_to_device_per_layer(own.pool, tokens_of([4, 3]), tokens_of([7, 6]), 0, "kernel")
        read(2, [7, 6, 8], 32, 40)
    assert found.error < 1e-5


def test_a_memory_saver_takes_pages_and_rings_and_nothing_else(monkeypatch):
    """Tables and codecs would be lost with their contents."""
    monkeypatch.setattr(Saver, "regions", {})
    monkeypatch.setattr(TorchMemorySaverAdapter, "create", staticmethod(lambda enable: Saver()))
    served = backend("saw-int4:centre=false,block=16").served
    own = {x.data_ptr() for layer in served.layers.values() for x in (layer.pages.pool, layer.pages.ring)}
    taken = {tensor.data_ptr() for tensor in Saver.regions[GPU_MEMORY_TYPE_KV_CACHE]}
    assert len(own) == 2
    assert taken == own


# Pages in files


@pytest.fixture
def files(tmp_path, monkeypatch) -> Callable[..., Any]:
    """SGLang's file storage, with kvfold's hooks: store(key, page) and fetch(key, page)."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    ranks |= dict.fromkeys(("tp_size", "pp_size", "attn_cp_size", "dcp_size"), 1)
    config = SimpleNamespace(**ranks, model_name="m", is_mla_model=False, extra_config={"max_size": "1M"})
    files = HiCacheFile(config)
    return SimpleNamespace(
        folder=tmp_path,
        store=partial(hierarchical_cache.store, HiCacheFile.set, files),
        fetch=partial(hierarchical_cache.fetch, HiCacheFile.get, files),
    )


def refused() -> float:
    return REGISTRY.get_sample_value("kvfold:refused_pages") or 0


PAGES = [torch.arange(200, dtype=torch.uint8), torch.arange(300, dtype=torch.int16).view(10, 30)]


@pytest.mark.parametrize("page", PAGES, ids=["bytes", "numbers"])
def test_stored_pages_are_read(page, files):
    """As often as one wants, and one that is not there is not refused."""
    before = refused()
    assert files.store("a", page)
    for _ in range(2):
        target = torch.zeros_like(page)
        assert files.fetch("a", target) is target
        assert torch.equal(target, page)
    assert files.fetch("b", torch.zeros_like(page)) is None
    assert refused() == before


@pytest.mark.parametrize("change", ["first", "last", "shorter", "empty", "another's"])
def test_a_stored_page_that_has_changed_is_refused_and_can_be_stored_again(change, files):
    page, before = PAGES[0], refused()
    assert files.store("a", page)
    (path,) = files.folder.glob("*.bin")
    content = bytearray(path.read_bytes())
    if change == "another's":
        assert files.store("b", page.flip(0))
        (other,) = set(files.folder.glob("*.bin")) - {path}
        content = other.read_bytes()
    elif change in ("first", "last"):
        content[0 if change == "first" else -1] ^= 1
    else:
        content = content[: 100 if change == "shorter" else 0]
    path.write_bytes(content)
    target = torch.zeros_like(page)
    assert files.fetch("a", target) is None
    assert not target.any()
    assert refused() == before + 1
    assert not path.exists()
    assert files.store("a", page)
    assert torch.equal(files.fetch("a", target), page)


def test_a_file_that_cannot_be_opened_stays(files, monkeypatch):
    """As when too many are open."""
    assert files.store("a", PAGES[0])
    before, (path,) = refused(), files.folder.glob("*.bin")

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    target = torch.zeros_like(PAGES[0])
    assert hierarchical_cache.fetch(fails, files, "a", target) is None
    assert not target.any()
    assert refused() == before
    assert path.exists()


# A server


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        (
            {"num_hidden_layers": 2, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
            {},
            "whose layers are all packed, and layers 0 of LlamaForCausalLM are not",
        ),
        ({}, {"speculative_algorithm": "EAGLE"}, "does not go together with --speculative-algorithm"),
        ({}, {"enable_memory_saver": True}, "storage-backend does not go together with --enable-memory-saver"),
    ],
)
def test_what_would_keep_wrong_pages_is_refused(config, arguments, reason):
    given = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "enable_memory_saver": False}
    given |= {"hicache_ratio": None, "hicache_size": 0, "speculative_algorithm": None}
    usual = SimpleNamespace(**given)
    hierarchical_cache.prepare(usual, Geometry.from_config(MODEL))
    assert usual.hicache_ratio == 2.0
    with pytest.raises(ValueError, match=reason):
        hierarchical_cache.prepare(SimpleNamespace(**given | arguments), Geometry.from_config(MODEL | config))


def test_storage_that_has_no_checksums_is_refused_later_too():
    with pytest.raises(ValueError, match="--hicache-storage-backend mooncake does not store packed pages"):
        hierarchical_cache.name_storage(SimpleNamespace(), SimpleNamespace(storage_backend_type="mooncake"))


BLOCKS = "oscar-int2:block=16"
LENGTHS = (150, 100, 53)
CACHED = [144, 96, 48]  # of these tokens, in whole pages of 16
TOKENS = 12  # of an answer
STORED = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
    "hicache_storage_prefetch_policy": "wait_complete",
    "max_total_tokens": 384,
    "chunked_prefill_size": 48,
    "log_level": "warning",
    "prepare": (hash_in_python, take_all_memory, save_memory),
}


class Prompts(NamedTuple):
    own: list[list[int]]
    others: list[list[int]]
    folder: Path

    def leave_and_come_back(self, engine: sglang.Engine) -> tuple[list[Answer], list[Answer]]:
        """Answers before and after all pages on the device were needed for others."""
        cold, _ = ask_alone(engine, self.own, TOKENS), ask_alone(engine, self.others, TOKENS)
        back = ask_alone(engine, self.own, TOKENS)
        pages = sum((len(prompt) + TOKENS - 1) // PAGE for prompt in (*self.own, *self.others))
        for _ in range(300):
            if len(list(self.folder.glob("*.bin"))) >= pages:
                return cold, back
            time.sleep(0.1)
        raise TimeoutError("SGLang does not store all pages")

    def start_again(self, engine: sglang.Engine) -> tuple[list[Answer], list[Answer]]:
        """Answers before and after all memory of the cache was given back."""
        first = ask_alone(engine, self.own, TOKENS)
        forget(engine)  # SGLang gives no memory back while it still works on what it has answered already
        engine.release_memory_occupation([GPU_MEMORY_TYPE_KV_CACHE])
        engine.resume_memory_occupation([GPU_MEMORY_TYPE_KV_CACHE])
        return first, ask_alone(engine, self.own, TOKENS)


def test_conversations_come_back_from_host_memory_and_after_a_restart_from_files(
    words, small, small_artifact, tmp_path, monkeypatch, capfd
):
    """With the same answers. What they read is what the definition of attention says. In the files of the second
    server, one page of the first prompt has changed: this prompt is read anew."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    own = [words[300 * i :][:length] for i, length in enumerate(LENGTHS)]
    prompts = Prompts(own, [words[2000 + 300 * i :][:200] for i in range(3)], tmp_path)
    served = partial(serve, recipe=BLOCKS, artifact=small_artifact, model_path=str(small), **STORED)
    with defined_attention() as found, moves_are_known(found):
        cold, back = served(prompts.leave_and_come_back)
    assert found.error < 1e-5
    assert [answer.cached for answer in cold] == [0, 0, 0]
    assert [answer.cached for answer in back] == CACHED
    assert [answer.tokens for answer in back] == [answer.tokens for answer in cold]

    stored = {path: path.read_bytes() for path in tmp_path.glob("*.bin")}
    changed = min(stored, key=lambda path: path.stat().st_mtime_ns)  # the first page of the first prompt
    changed.write_bytes(b"?" + stored[changed][1:])
    capfd.readouterr()
    first, again = served(prompts.start_again)
    assert capfd.readouterr().err.count("is not what was stored") == 1
    assert [answer.cached for answer in first] == [0, *CACHED[1:]]
    assert first[1:] == back[1:]
    assert first[0] == cold[0]
    assert [answer.cached for answer in again] == CACHED
    assert again == back
    assert {path: path.read_bytes() for path in stored} == stored
