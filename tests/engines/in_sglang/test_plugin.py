"""The plugin: what fits, what is refused, what happens when it fails, and decoding as CUDA graphs see it."""

import math
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from defined_attention import defined_attention
from forked import Ended, forked
from operations_files import metrics_asked_for
from prometheus_client import REGISTRY
from recorded_graphs import KERNELS, recorder
from served import serving
from sglang.srt import runtime_context
from sglang.srt.environ import envs
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_engine import Answer, ask, serve, tokens_that_fit
from tiny_models import random_tokens, tiny

from kvfold.artifact import Artifact
from kvfold.calibration import calibrate
from kvfold.engines.serving import Config, Plan
from kvfold.engines.sglang import hooks
from kvfold.engines.sglang.attention import MixedBackend, PackedBackend
from kvfold.engines.sglang.packed_pool import PackedPool
from kvfold.recipes import parse
from kvfold.text import default_text, tokenize

MIB = 2**20
PAGE, PAGES = 16, 24
KV_HEADS, RATIO, DIMS = 2, 3, 64
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "num_attention_heads": KV_HEADS * RATIO,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIMS,
}


# Room


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory) -> tuple[str, str]:
    """A random model with heads of 128, and what recipes need of it."""
    model, folder = tiny("Qwen3", head_dim=128), tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    recipes = [parse("saw-int4"), parse("oscar-int2:group=128")]
    calibrate(model, random_tokens(1024), 256, recipes).save(folder / "fits")
    return str(folder), str(folder / "fits")


@pytest.mark.parametrize(("recipe", "times"), [("saw-int4", 3.7), ("oscar-int2:group=128", 6.9)])
def test_heads_of_128_leave_room_for_more_tokens(recipe, times, wide_heads, capfd):
    """Than 16 bits, by SGLang's own count, with rings among what is counted; and the log says it."""
    model, fits = wide_heads
    options = {"model_path": model, "context_length": 512, "max_running_requests": 4, "page_size": 256}
    token_bytes = 2 * 2 * 2 * 128 * 2  # 2 layers and 2 KV heads, K and V, 16 bits
    wide, packed = (
        serve(tokens_that_fit, *each, budget=256 * MIB, dtype="bfloat16", log_level="info", **options)
        for each in ((), (recipe, fits))
    )
    assert wide == 256 * MIB // token_bytes
    assert packed >= times * wide
    printed = capfd.readouterr().err
    assert f"so that {packed:,} tokens fit" in printed
    if block := parse(recipe).block:
        per_request = f"{(block + 16) * token_bytes / MIB:.1f} MiB per request"
        assert f"open block: up to {block} tokens of a running request in 16 bits, {per_request}" in printed


def test_rings_come_off_the_budget_first(artifact):
    """Those of 2 requests and of padding: 16 tokens of the open block and 16 of a step each."""
    tokens = serve(tokens_that_fit, "int2:block=16", artifact, budget=16 * MIB, max_running_requests=2)
    sides = 30 * 3 * 2  # of 30 layers and 3 KV heads, with 64 numbers
    left = 16 * MIB - 3 * (16 + 16) * sides * 64 * 2
    assert tokens == left // (sides * (64 * 2 // 8 + 4)) // PAGE * PAGE


def test_recipes_without_an_open_block_need_no_number_of_requests(artifact):
    """SGLang finds one itself, and only later."""
    serve(tokens_that_fit, "int4", artifact, budget=16 * MIB, max_running_requests=None)


# Refusals


@pytest.mark.parametrize(
    ("recipe", "arguments", "reason"),
    [
        ("int5", {}, "unknown recipe 'int5'"),
        ("kivi-2", {}, "kivi-2 is for evaluation, as no kernel stores it"),
        ("oscar-int2:group=32", {}, "the artifact was not calibrated for oscar-int2:group=32"),
        ("int4", {"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 does not go together .*: leave it out"),
        ("int4", {"attention_backend": "torch_native"}, "--attention-backend torch_native .*: leave it out"),
        ("int4", {"speculative_algorithm": "NGRAM"}, "form a tree: add --speculative-ngram-max-bfs-breadth 1"),
        ("int4", {"hicache_storage_backend": "nixl"}, "--hicache-storage-backend nixl does not go together"),
        ("int4", {"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill does not go together"),
        ("int4", {"disaggregation_mode": "decode"}, "--disaggregation-mode decode does not go together"),
        ("int4", {"page_size": 8}, "a multiple of 16 tokens, not --page-size 8"),
        ("int4:block=32", {}, "pages of 16 tokens, which have to be whole open blocks of 32: take pages of a multiple"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(recipe, arguments, reason, artifact):
    with pytest.raises(SystemExit, match=f"^kvfold cannot serve this: .*{reason}"):
        serve(tokens_that_fit, recipe, artifact, **arguments)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"use_irope": True}, "chunks"),
        ({"v_head_dim": 32}, "heads of another number or size"),
        ({"is_cross_attention": True}, "cross attention"),
    ],
)
def test_attention_that_cannot_be_packed_is_refused(options, what):
    heads = KV_HEADS * RATIO, DIMS, 0.125, KV_HEADS
    model = torch.nn.ModuleList([RadixAttention(*heads, layer_id=0, **options)])
    with pytest.raises(ValueError, match=what):
        backend("int4:centre=false", model)


ALLOWED = {name: values[0] for name, values in hooks.PLAIN.items()}


@pytest.mark.parametrize("flag", sorted(hooks.PLAIN.keys() - {"enable_hierarchical_cache"}))
def test_flags_that_are_refused_are_named(flag):
    hooks.refuse(SimpleNamespace(**ALLOWED))
    with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')} another does not go together .*: leave it out$"):
        hooks.refuse(SimpleNamespace(**ALLOWED | {flag: "another"}))


@pytest.mark.parametrize(
    ("flag", "version", "refused"),
    [
        ("hicache_storage_backend", "0.5.17", True),
        ("cuda_graph_backend_prefill", "0.5.99", True),
        ("enable_kv_cache_sharding", "0.5.21", False),
        ("enable_kv_cache_sharding", "0.5.22", True),
    ],
)
def test_a_flag_that_sglang_has_renamed_ends_the_start(flag, version, refused, monkeypatch):
    """Else it would no longer be refused. Older versions do not have all of them."""
    monkeypatch.setattr(hooks, "version", lambda _: version)
    arguments = SimpleNamespace(**{name: value for name, value in ALLOWED.items() if name != flag})
    if refused:
        with pytest.raises(
            ValueError, match=f"SGLang {version} has no --{flag.replace('_', '-')}, which kvfold has to"
        ):
            hooks.refuse(arguments)
    else:
        hooks.refuse(arguments)


@pytest.mark.parametrize("name", hooks.VARIABLES)
def test_variables_that_are_refused_are_named(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    if not hasattr(envs, name):
        pytest.skip(f"this SGLang has no {name}")
    with pytest.raises(ValueError, match=f"{name} does not go together .*: unset it$"):
        hooks.refuse(SimpleNamespace(**ALLOWED))


@pytest.mark.parametrize(
    ("version", "warns"), [("0.5.9", True), (hooks.OLDEST, False), (hooks.NEWEST, False), ("0.5.99", True)]
)
def test_versions_that_kvfold_is_not_made_for_are_warned_of(version, warns, monkeypatch, caplog):
    monkeypatch.setattr(hooks, "version", lambda _: version)
    hooks.check_version()
    warning = f"kvfold is made for SGLang {hooks.OLDEST} to {hooks.NEWEST}, and this is {version}"
    assert caplog.messages == ([warning] if warns else [])


# Failures

LOAD = """
from prometheus_client import REGISTRY
before = set(sys.modules)
load_plugins()
print(*sorted(sys.modules.keys() - before))
print(*[metric.name for metric in REGISTRY.collect() if "kvfold" in metric.name])
"""
BROKEN = "sys.modules['kvfold.format.layout'] = None; load_plugins()"


@pytest.fixture(scope="module")
def loaded() -> list[Ended]:
    """SGLang's plugins: without a recipe, with a kvfold that cannot be imported, and with a recipe that is unknown."""
    imports = "import sys\nfrom sglang.srt.plugins import load_plugins"
    recipes = ("", LOAD), ("", BROKEN), ("int4", BROKEN), ("int5", "load_plugins()")
    return forked(imports, [({"KVFOLD_RECIPE": recipe}, code) for recipe, code in recipes])


def test_nothing_of_kvfold_is_loaded_where_nothing_asks_for_it(loaded):
    modules, gauges = loaded[0].printed.splitlines()
    assert {name for name in modules.split() if name.startswith(("kvfold", "sglang", "torch"))} == {
        *("kvfold", "kvfold.engines", "kvfold.engines.start", "kvfold.engines.sglang", "kvfold.engines.sglang.entry")
    }
    assert not gauges
    assert loaded[1].status == 0, loaded[1].errors


@pytest.mark.parametrize(("number", "named"), [(2, "kvfold.format.layout"), (3, "unknown recipe 'int5'")])
def test_what_fails_while_kvfold_is_loaded_ends_sglang_with_one_line(loaded, number, named):
    """Which would log it and serve in 16 bits."""
    assert loaded[number].status == 1
    *_, last = loaded[number].errors.splitlines()
    assert last.startswith("kvfold cannot serve this: ")
    assert named in last


def test_a_hook_that_sglang_does_not_have_ends_it(artifact, monkeypatch):
    monkeypatch.delattr("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool")
    with pytest.raises(SystemExit, match=r"kvfold cannot serve this: SGLang [\d.]+ has no .*_build_mha_kv_pool; "):
        serve(tokens_that_fit, "int4", artifact)


@pytest.mark.parametrize(
    ("hook", "stand_in", "reason"),
    [
        ("rings_of", lambda _: 8, "has 9 rows for requests, and there are rings for 8"),
        ("build_pool", lambda build, *a, **k: build(*a, **k), "made a MHATokenToKVPool instead of packed pages"),
        ("cell_size", lambda size, *_: size, "counts 46080 bytes for a token, and it takes 6480"),
    ],
)
def test_hooks_that_do_not_take_effect_end_the_start(hook, stand_in, reason, artifact, monkeypatch, capfd):
    monkeypatch.setattr(hooks, hook, stand_in)
    with pytest.raises(BrokenProcessPool):  # SGLang ends its whole process when a scheduler does
        serve(tokens_that_fit, "int4:block=16", artifact, max_total_tokens=512)
    assert f"ValueError: kvfold: SGLang {reason}" in capfd.readouterr().err


KERNELS_BESIDE_SGLANG = """
import importlib, pkgutil
import sglang.srt.managers.scheduler
from triton.runtime.jit import JITFunction
import kvfold.ops
names = [found.name for found in pkgutil.walk_packages(kvfold.ops.__path__, "kvfold.ops.")]
names = [name for name in names if not name.endswith("cpu")]  # which need numba
values = [value for name in names for value in vars(importlib.import_module(name)).values()]
print(len([value.cache_key for value in values if isinstance(value, JITFunction)]))
"""


def test_kernels_call_nothing_that_sglang_replaces():
    """It replaces functions of Triton, which refuses to compile a kernel that calls one that is not its own."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    told = subprocess.run(
        [sys.executable, "-c", KERNELS_BESIDE_SGLANG], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert int(told.stdout.splitlines()[-1]) > 50


# Numbers that cannot be stored

POISON = 9  # a token that is in no prompt


def ask_beside_nan(engine, prompts: list[list[int]]) -> list[list[Answer]]:
    """Answers without the poisoned token, with it in the first two prompts, and without it again."""
    first, last, *others = prompts
    broken = [*first[:10], POISON, *first[11:20], POISON, *first[21:]], [*last[:-1], POISON]
    return [ask(engine, [*some, *others], 17) for some in ((first, last), broken, (first, last))]


def test_nan_of_one_request_changes_nothing_for_others(artifact, embedded, monkeypatch, capfd):
    """Not a bit, beside it and in the pages that it had. It is counted, and what comes after it is finite."""
    tokens = tokenize(default_text("evaluation"), embedded[1], 1000).tolist()
    prompts = [tokens[200 * i :][:length] for i, length in enumerate((30, 18, 40, 7))]
    assert POISON not in tokens
    embed, process, waiting = VocabParallelEmbedding.forward, Scheduler.process_input_requests, []

    def poisoned(layer, tokens):
        return embed(layer, tokens).masked_fill((tokens == POISON).unsqueeze(-1), torch.nan)

    def together(scheduler, requests):
        """All prompts begin in one step, so that sizes of matrix products are the same every time."""
        for request in requests:
            if isinstance(request, TokenizedGenerateReqInput):
                waiting.append(request)
            else:
                process(scheduler, [request])
        if len(waiting) == len(prompts):
            process(scheduler, sorted(waiting, key=lambda request: len(request.input_ids)))
            waiting.clear()

    monkeypatch.setattr(VocabParallelEmbedding, "forward", poisoned)
    monkeypatch.setattr(Scheduler, "process_input_requests", together)
    options = {"max_total_tokens": 512, "disable_radix_cache": True, "log_level": "warning"}
    before, beside, after = serve(partial(ask_beside_nan, prompts=prompts), "int2:block=16", artifact, **options)
    assert beside[2:] == before[2:]
    assert after == before
    logprobs = beside[0].logprobs + beside[1].logprobs[1:]  # without that of the poisoned token itself
    assert all(map(math.isfinite, logprobs))
    assert re.findall("keys or values of (.*) tokens held NaN", capfd.readouterr().err) == ["3"]


# The server


def test_the_server_answers_and_shows_its_gauges():
    flags = ("--context-length", "512", "--max-running-requests", "4", "--enable-metrics")
    with serving("--engine", "sglang", "-r", "saw-int4:centre=false,block=16", *flags) as server:
        server.complete(tokens := list(range(100, 500)), 1)
        streamed = {"model": "embedded", "max_tokens": 4, "stream": True}  # SGLang times tokens of such answers alone
        server.get("/v1/completions", prompt=[*tokens[:200], *range(600, 650)], **streamed)
        assert server.complete().startswith(" Berlin")
        gauges = server.metrics("/metrics/")
    assert gauges["kvfold:bytes_per_token"] == (32 + 4) * 2 * 3 * 30
    tokens = int(re.search(r"so that ([\d,]+) tokens fit", server.printed)[1].replace(",", ""))
    taken = 36 * tokens + 128 * 5 * (16 + 16)  # rings of 4 requests and of padding
    assert gauges["kvfold:compression"] == pytest.approx(128 * tokens / taken, rel=1e-3)
    assert gauges["kvfold:non_finite_tokens"] == 0
    exported = {name.partition("{")[0] for name in gauges}
    assert metrics_asked_for("sglang") | metrics_asked_for("kvfold") <= exported
    assert "30 packed" in server.printed


# Steps


def backend(
    recipe: str,
    model: torch.nn.Module | None = None,
    config: dict[str, Any] = MODEL,
) -> PackedBackend:
    """Of three requests and one of padding."""
    plan = Plan.make(Config(parse(recipe)), config, PAGE, torch.bfloat16)
    pool = PackedPool(
        *(plan, 4 if plan.block else 0, (), MHATokenToKVPool, PAGES * PAGE),
        page_size=PAGE,
        layer_num=len(plan.layouts),
        device="cpu",
        enable_memory_saver=False,
    )
    requests = SimpleNamespace(req_to_token=torch.zeros(4, 8 * PAGE, dtype=torch.int32))
    model = model or torch.nn.Module()
    return PackedBackend(SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=requests, model=model, device="cpu"))


def reading(backend: PackedBackend, rows: list[int], starts: list[int], lengths: list[int]) -> SimpleNamespace:
    """A batch of prompts, as SGLang's scheduler would describe it."""
    slots = [backend.req_to_token[row, start:end] for row, start, end in zip(rows, starts, lengths, strict=True)]
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        num_padding=0,
        seq_lens=torch.tensor(lengths),
        extend_prefix_lens=torch.tensor(starts),
        extend_prefix_lens_cpu=starts,
        extend_seq_lens_cpu=[end - start for start, end in zip(starts, lengths, strict=True)],
        out_cache_loc=torch.cat(slots).long(),
        req_pool_indices=torch.tensor(rows),
    )


def decoding(rows: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, padding: int) -> SimpleNamespace:
    """A batch of one token of each request, as it is padded for a CUDA graph."""
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        num_padding=padding,
        seq_lens=lengths,
        out_cache_loc=slots,
        req_pool_indices=rows,
    )


def beside_other_ranks(batch: SimpleNamespace, requests: int) -> ForwardBatch:
    """A step of data-parallel attention. Behind its requests is padding, up to the step of another rank."""
    own = {name: value for name, value in vars(batch).items() if name != "num_padding"}
    return ForwardBatch(**own, input_ids=None, seq_lens_sum=None, _original_batch_size=requests)


class Requests:
    """Two requests with pages here and there, as SGLang's scheduler would describe them, and one of padding."""

    layer = RadixAttention(KV_HEADS * RATIO, DIMS, DIMS**-0.5, KV_HEADS, layer_id=0)

    def __init__(self, backend: PackedBackend, lengths: list[int]) -> None:
        self.backend, self.lengths = backend, lengths
        pages = 1 + torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))
        for row, own in enumerate(pages[:16].view(2, 8), 1):
            backend.req_to_token[row] = (own.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
        self.rows, self.after, self.slots = (torch.zeros(3, dtype=torch.int64) for _ in range(3))
        self.batch = decoding(self.rows, self.after, self.slots, padding=1)

    def extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = reading(self.backend, [1, 2], [0, 0], self.lengths)
        self.backend.init_forward_metadata(batch)
        return self.backend.forward_extend(q, k, v, self.layer, batch)

    def grow(self) -> None:
        """Another token of each."""
        self.lengths = [length + 1 for length in self.lengths]
        self.rows.copy_(torch.tensor([1, 2, 0]))
        self.after.copy_(torch.tensor([*self.lengths, 1]))
        self.slots.copy_(self.backend.req_to_token[self.rows, self.after - 1])

    def sit_out(self) -> None:
        """A step of padding alone: other ranks of data-parallel attention have requests."""
        for numbers, padding in ((self.rows, 0), (self.after, 1), (self.slots, 0)):
            numbers.fill_(padding)
        self.backend.init_forward_metadata_out_graph(decoding(self.rows, self.after, self.slots, padding=3))

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What SGLang captures of a step."""
        self.backend.init_forward_metadata_in_graph(self.batch)
        return self.backend.forward_decode(q, k, v, self.layer, self.batch)


def bytes_of_rings(backend: PackedBackend) -> torch.Tensor:
    """uint8[rows, bytes]"""
    (layer,) = backend.served.layers.values()
    return layer.pages.ring.view(torch.uint8).flatten(1)


def tokens(n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Queries, keys and values."""
    heads = (KV_HEADS * RATIO, KV_HEADS, KV_HEADS)
    return [torch.randn(n, each, DIMS, generator=generator).bfloat16() for each in heads]


@pytest.mark.usefixtures("_poisoned_memory")
def test_a_captured_step_reads_what_the_next_ones_bring(monkeypatch):
    """Against the same requests without kernels, without a graph and without idle steps, over the ends of pages."""
    recipe = "int4:centre=false,block=16"
    generator = torch.Generator().manual_seed(0)
    plain = Requests(backend(recipe), [37, 13])
    monkeypatch.setattr("kvfold.engines.serving.choose", lambda *_, **__: KERNELS)
    own = Requests(backend(recipe), [37, 13])
    assert (own.backend.captured, plain.backend.captured) == (True, False)
    static = tokens(3, generator)
    static[0] = static[0].flatten(1)
    own.backend.init_cuda_graph_state(4, 4)

    def begin() -> None:
        own.after.fill_(1)  # all of it padding
        own.backend.init_forward_metadata_out_graph(own.batch, in_capture=True)

    graph, out = recorder(monkeypatch)(begin, lambda: own.decode(*static))

    padding = bytes_of_rings(own.backend)[0].clone()
    first = tokens(50, generator)
    torch.testing.assert_close(own.extend(*first), plain.extend(*first), atol=2e-2, rtol=0)
    for _ in range(12):
        new = tokens(3, generator)
        for target, x in zip(static, new, strict=True):
            target.copy_(x.view_as(target))
        for requests in (own, plain):
            requests.grow()
            requests.backend.init_forward_metadata_out_graph(requests.batch)
        written = own.backend.req_to_token.clone()
        own.backend.req_to_token.zero_()  # where SGLang may write during a replay
        graph.replay()
        own.backend.req_to_token.copy_(written)
        torch.testing.assert_close(out[:2], plain.decode(*new)[:2], atol=2e-2, rtol=0)
        if own.lengths[0] % 6 == 0:
            own.sit_out()
            graph.replay()
    assert torch.equal(bytes_of_rings(own.backend)[1:3], bytes_of_rings(plain.backend)[1:3])
    assert torch.equal(bytes_of_rings(own.backend)[0], padding)


def test_prefill_graphs_are_captured_without_pages():
    """SGLang captures parts of a prompt that is padding alone, and runs attention between them."""
    prompt = Requests(backend("int4:centre=false,block=16"), [37, 13])
    batch = reading(prompt.backend, [0], [0], [50])
    prompt.backend.init_forward_metadata(batch)
    q, k, v = tokens(50, torch.Generator().manual_seed(0))
    held = [*prompt.backend.pool.rows, bytes_of_rings(prompt.backend)]
    before = [each.clone() for each in held]
    assert prompt.backend.forward_extend(q, k, v, prompt.layer, batch).shape == (50, KV_HEADS * RATIO * DIMS)
    assert all(map(torch.equal, held, before))


@pytest.mark.usefixtures("_poisoned_memory")
def test_padding_beside_prompts_of_other_ranks_changes_nothing():
    """Padding behind a prompt, and on an idle rank a prompt of padding alone. It is longer than a prompt can be."""
    recipe, (q, k, v) = "int4:centre=false,block=16", tokens(200, torch.Generator().manual_seed(0))
    alone, padded = (Requests(backend(recipe), [37, 13]) for _ in range(2))
    expected = alone.extend(q[:50], k[:50], v[:50])
    batch = reading(padded.backend, [1, 2], [0, 0], padded.lengths)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(14, dtype=torch.int64)))
    idle = reading(padded.backend, [0], [0], [200])
    idle.out_cache_loc = torch.zeros(200, dtype=torch.int64)
    for given, requests, n, read in ((batch, 2, 64, expected), (idle, 0, 200, torch.zeros(200, expected.shape[1]))):
        step = beside_other_ranks(given, requests)
        padded.backend.init_forward_metadata(step)
        out = padded.backend.forward(q[:n], k[:n], v[:n], padded.layer, step)
        assert torch.equal(out[: len(read)], read.bfloat16())
        assert len(out) == n
        assert all(map(torch.equal, padded.backend.pool.rows, alone.backend.pool.rows))
        assert torch.equal(bytes_of_rings(padded.backend), bytes_of_rings(alone.backend))


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.usefixtures("_poisoned_memory")
def test_chunks_begin_inside_a_block_beside_tokens_that_are_decoded(block):
    """In a third row, requests begin after a cached prefix of two pages. In its ring is NaN for the first of them, and
    for the others what the one before has left."""
    generator = torch.Generator().manual_seed(block)
    requests = Requests(backend(f"int4:centre=false,block={block}"), [37, 13])
    own, table = requests.backend, requests.backend.req_to_token
    free = sorted(set(range(1, 1 + PAGES)) - set((table[1:3] // PAGE).flatten().tolist()))
    table[3] = table[1]
    table[3, 2 * PAGE : 5 * PAGE] = (torch.tensor(free[:3]).unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
    with defined_attention() as found:
        requests.extend(*(x.float() for x in tokens(37 + 13, generator)))
        for chunks in ((13, 30, 5), (1, 2, 40), (45,)):
            start = 2 * PAGE
            for count in chunks:
                rows = [[3, start, start + count]]
                rows += [[row, length, length + 1] for row, length in enumerate(requests.lengths, 1)]
                batch = reading(own, *(list(column) for column in zip(*rows, strict=True)))
                batch.forward_mode = ForwardMode.MIXED
                own.init_forward_metadata(batch)
                own.forward_extend(*(x.float() for x in tokens(count + 2, generator)), requests.layer, batch)
                start, requests.lengths = start + count, [length + 1 for length in requests.lengths]
    assert found.queries == 37 + 13 + 48 + 43 + 45 + 7 * 2
    assert found.error < 1e-5


@pytest.mark.parametrize(("kind", "refused"), [("breakable", False), ("disabled", False), ("full", True)])
def test_prefill_graphs_that_hold_attention_are_refused(kind, refused, monkeypatch):
    chosen = SimpleNamespace(prefill=SimpleNamespace(backend=kind))
    execution = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=chosen), cuda_graph_config=chosen)
    monkeypatch.setattr("sglang.srt.model_executor.cuda_graph_config.get_exec", lambda: execution)
    if refused:
        with pytest.raises(SystemExit, match="of the kind full hold attention: add --disable-prefill-cuda-graph"):
            hooks.refuse_prefill_graphs()
    else:
        hooks.refuse_prefill_graphs()


def test_values_may_have_another_size_than_keys():
    """Against the definition of causal attention, in a prompt and in a decode step."""
    generator, values = torch.Generator().manual_seed(0), 32
    requests = Requests(backend("bf16", config=MODEL | {"v_head_dim": values}), [37, 13])
    requests.layer = RadixAttention(KV_HEADS * RATIO, DIMS, DIMS**-0.5, KV_HEADS, layer_id=0, v_head_dim=values)
    first, last = tokens(50, generator), tokens(3, generator)
    for new in (first, last):
        new[2] = new[2][..., :values].contiguous()
    out = requests.extend(*first).unflatten(1, (-1, values))
    requests.grow()
    requests.backend.init_forward_metadata_out_graph(requests.batch)
    decoded = requests.decode(*last).unflatten(1, (-1, values))
    for row, own in enumerate((slice(37), slice(37, 50))):
        expected = causal(*(torch.cat((x[own], y[row : row + 1])).double() for x, y in zip(first, last, strict=True)))
        torch.testing.assert_close(out[own].double(), expected[:-1], atol=2e-2, rtol=0)
        torch.testing.assert_close(decoded[row].double(), expected[-1], atol=2e-2, rtol=0)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(RATIO, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * DIMS**-0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


BATCH = SimpleNamespace(forward_mode=ForwardMode.DECODE, logical_forward_mode=ForwardMode.DECODE)
HOOKS = {
    "init_cuda_graph_state": call(8, 8),
    "init_forward_metadata": call(BATCH),
    "init_forward_metadata_out_graph": call(BATCH, in_capture=True),
    "init_forward_metadata_in_graph": call(BATCH),
}


@pytest.mark.parametrize("linear", [False, True])
def test_what_graphs_need_reaches_packed_layers_and_others(linear, monkeypatch):
    """Sliding layers, and layers of linear attention, whose backend SGLang itself puts beside that of full layers."""
    monkeypatch.setattr(hybrid_linear_attn_backend, "check_cuda_graph_backend", lambda *_: False, raising=False)
    packed, other = MagicMock(), MagicMock()
    packed.served.layers = {1: None}
    both = HybridLinearAttnBackend(packed, other, [1]) if linear else MixedBackend(packed, other)
    for name, arguments in HOOKS.items():
        getattr(both, name)(*arguments.args, **arguments.kwargs)
        for backend in (packed, other):
            assert getattr(backend, name).call_args == arguments
    for number, backend in ((0, other), (1, packed)):
        both.forward("q", "k", "v", SimpleNamespace(layer_id=number), BATCH)
        assert (backend.forward.called, backend.forward_decode.called) == ((False, True) if linear else (True, False))


def rank(model: str, start: int, end: int) -> SimpleNamespace:
    """What SGLang knows of a rank with these layers."""
    source = {"model_path": model, "trust_remote_code": False, "revision": None, "json_model_override_args": "{}"}
    return SimpleNamespace(
        server_args=SimpleNamespace(**source),
        page_size=PAGE,
        model_dtype=torch.bfloat16,
        device="cpu",
        is_hybrid_swa=False,
        layer_info=SimpleNamespace(start_layer=start, end_layer=end),
    )


def test_a_rank_of_a_pipeline_packs_its_own_layers(monkeypatch, tmp_path):
    tiny("Gemma3").save_pretrained(tmp_path)
    monkeypatch.setenv("KVFOLD_RECIPE", "int4:centre=false")
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=0, attn_tp_size=1))
    own = partial(rank, str(tmp_path))
    for start, end, packed, local in ((0, 3, [2], [0, 1]), (3, 6, [5], [3, 4])):
        assert list(hooks.plan_of(own(start, end)).layouts) == packed
        assert hooks.local_layers_in_pool(own(start, end)) == local
    whole = hooks.plan_of(own(0, 6))
    hooks.refuse_idle_ranks(whole, 2)
    with pytest.raises(ValueError, match="--pp-size 3 leaves a rank only layers 0, 1, which are not packed: use fewer"):
        hooks.refuse_idle_ranks(whole, 3)


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        ({"dp_size": 4, "enable_dp_attention": False}, 1),  # servers of their own
        ({"dp_size": 4, "enable_dp_attention": True}, 4),
        ({"dp_size": 1, "enable_dp_attention": False, "attn_dp_size": 1}, 1),
        ({"dp_size": 1, "enable_dp_attention": False, "attn_dp_size": 2}, 2),
    ],
)
def test_data_parallel_attention_by_its_old_flags_and_its_new_one(arguments, groups):
    assert hooks.attention_groups(SimpleNamespace(**arguments)) == groups


def test_a_rank_of_data_parallel_attention_has_heads_of_its_group_and_its_own_requests(monkeypatch, wide_heads):
    """Of 4 ranks in 2 groups, the last has the second of two KV heads."""
    model, fits = wide_heads
    parallel = SimpleNamespace(tp_rank=3, tp_size=4, attn_tp_rank=1, attn_tp_size=2, attn_dp_rank=1, attn_dp_size=2)
    schedule = SimpleNamespace(max_running_requests=8)
    monkeypatch.setenv("KVFOLD_RECIPE", "saw-int4:block=16")
    monkeypatch.setenv("KVFOLD_ARTIFACT", fits)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    plan = hooks.plan_of(configurator := rank(model, 0, 2))
    assert plan.kv_heads == 1
    mean = Artifact.load(fits).tensors["key_mean"]
    for layer in range(2):
        assert torch.equal(plan.codecs[layer][0].transform.mean, mean[layer, 1:])
    taken = (1 + 4) * (16 + 16) * 2 * 2 * 128 * 2  # rings of padding and 4 requests; 2 layers, K and V, 16 bits
    assert hooks.page_budget(taken + 5, configurator) == 5
    with pytest.raises(ValueError, match=r"take 0 of 0 MiB for the cache: lower --max-running-requests"):
        hooks.page_budget(taken, configurator)


@pytest.mark.usefixtures("_poisoned_memory")
def test_a_later_step_tells_what_kernels_could_not_store(monkeypatch):
    """A token counts once, in however many of its heads it cannot be stored; padding does not."""
    monkeypatch.setattr("kvfold.engines.serving.choose", lambda *_, **__: KERNELS)
    requests, generator = Requests(backend("int4:centre=false"), [37, 13]), torch.Generator().manual_seed(0)
    requests.extend(*tokens(37 + 13, generator))
    q, k, v = tokens(3, generator)
    k[1, :, 3], v[1, 0, 5], v[2] = torch.inf, torch.nan, torch.nan
    for _ in range(33):
        requests.grow()
        requests.backend.init_forward_metadata_out_graph(requests.batch)
        if requests.lengths[0] == 38:
            assert requests.decode(q, k, v)[:2].isfinite().all()
    assert REGISTRY.get_sample_value("kvfold:non_finite_tokens") == 1
