"""How a step is described on a GPU: the kernels that read the description give what the definition says."""

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from recorded_graphs import KERNELS, Recording
from tiny_models import tiny
from vllm import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvfold.engines.vllm import backend, engine
from kvfold.engines.vllm.rings import RingBuilder
from kvfold.ops import naive
from kvfold.ops.attend import unpacked_prefill
from kvfold.ops.attend.flash_attention_3 import VLLM, Ends, Library, Paged
from kvfold.ops.dispatch import Choice, Ops
from kvfold.ops.pages import Logits
from kvfold.paged.layer import Steps

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

OPEN = 16  # tokens of the open block
PAGE, PAGES, WIDTH = 16, 48, 8  # rings take half of the pages
KV_HEADS, RATIO, DIMS = 2, 2, 64


def defined(pages, q, new, logits, out):
    return out.copy_(naive.attend(pages, q, new, logits))


DEFINITION = Ops(*(Choice("naive", "", run) for run in (naive.store, defined, defined)))


class Device:
    """Builders and a layer of an engine of its own, which run as on a GPU or by the definition."""

    def __init__(self, config, gpu: bool, ratio: int = 1) -> None:
        made = engine.Engine(config)
        spec = FullAttentionSpec(block_size=ratio * PAGE, num_kv_heads=KV_HEADS, head_size=DIMS, dtype=torch.float16)
        layouts = {f"model.layers.{number}.self_attn.attn": made.served.plan.layouts[number] for number in range(2)}
        modules = {
            name: SimpleNamespace(
                impl=SimpleNamespace(engine=made),
                kv_sharing_target_layer_name=None,
                kv_cache=torch.empty(
                    *(PAGES // ratio, KV_HEADS, ratio * PAGE, layout.page_bytes // PAGE), dtype=torch.uint8
                ),
            )
            for name, layout in layouts.items()
        }
        config.compilation_config.static_forward_context = modules
        engine.Engine.current = made
        packed, *others = kv_cache_utils.get_kv_cache_groups(config, made.sized(dict.fromkeys(layouts, spec)))
        made.open(KVCacheConfig(PAGES // ratio, [], [packed, *others]))
        made.attach()
        described = config, torch.device("cpu")
        self.builder = backend.PackedMetadataBuilder(spec, packed.layer_names, *described, WIDTH // ratio)
        self.rings = [RingBuilder(group.kv_cache_spec, group.layer_names, *described) for group in others]
        self.layer = made.layers["model.layers.0.self_attn.attn"]
        self.layer.ops = KERNELS if gpu else DEFINITION
        if gpu:
            self.builder.device = SimpleNamespace(type="cuda")

    def build(self, step: CommonAttentionMetadata, requests: "Requests") -> Steps:
        for builder in self.rings:
            rings = requests.rings(builder.kv_cache_spec.blocks, step.num_reqs)
            builder.build(0, replace(step, block_table_tensor=rings))
        return self.builder.build(0, step).steps

    def run(self, requests: "Requests", step: CommonAttentionMetadata, *tokens: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(tokens[0], torch.nan)
        self.steps = self.build(step, requests)
        self.layer.attend(self.steps, *tokens, Logits(DIMS**-0.5), out)
        return out


class Graph:
    """The attention of a step as a CUDA graph (recorded_graphs.py). vLLM describes later steps in the same memory."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.monkeypatch = device, monkeypatch

    def capture(self, requests: "Requests", step: CommonAttentionMetadata, *tokens: torch.Tensor) -> torch.Tensor:
        self.step, self.tokens, self.out = step, tokens, torch.full_like(tokens[0], torch.nan)
        steps = self.device.build(step, requests)
        self.recording = Recording(self.monkeypatch)
        with self.recording:
            self.device.layer.attend(steps, *tokens, Logits(DIMS**-0.5), self.out)
        self.recording.live = False
        return self.out.clone()

    def replay(self, requests: "Requests", step: CommonAttentionMetadata, *tokens: torch.Tensor) -> torch.Tensor:
        for kept, new in zip(self.tokens, tokens, strict=True):
            kept.copy_(new)
        described = {name: new for name, new in vars(step).items() if isinstance(new, torch.Tensor)}
        placed = {name: getattr(self.step, name).copy_(new) for name, new in described.items()}
        self.device.build(replace(step, **placed), requests)
        self.out.fill_(torch.nan)
        self.recording.replay()
        return self.out


@pytest.fixture
def config(request, tmp_path, monkeypatch):
    block = getattr(request, "param", OPEN)
    tiny(head_dim=DIMS).save_pretrained(tmp_path)
    monkeypatch.setattr(engine, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(engine.Engine, "current", None)
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": PAGE, "max_model_len": WIDTH * PAGE}
    asked = {"kvfold": {"recipe": f"int4:centre=false,block={block}"}}
    config = EngineArgs(str(tmp_path), dtype="float16", additional_config=asked, **given).create_engine_config()
    config.cache_config.num_gpu_blocks = PAGES
    return config


class Requests:
    """Three requests with blocks here and there, as vLLM's scheduler would describe them: those that decode first."""

    def __init__(self, ratio: int) -> None:
        order = torch.randperm(PAGES // ratio, generator=torch.Generator().manual_seed(0)).int()
        self.table, self.others = order[: 3 * WIDTH // ratio].view(3, -1), order[3 * WIDTH // ratio :].view(3, -1)
        self.block, self.lengths = ratio * PAGE, [0, 0, 0]

    def rings(self, blocks: int, rows: int) -> torch.Tensor:
        """The blocks of each request's ring. vLLM's table is wider than they are, and has rows of padding."""
        table = torch.zeros(rows, 2 * blocks, dtype=torch.int32)
        table[:3, :blocks] = self.others[:, :blocks]
        return table

    def step(self, counts: list[int], padding: int = 0, tokens: int | None = None) -> CommonAttentionMetadata:
        """So many tokens of each request, and rows of padding for a CUDA graph, with `tokens` tokens, by default one
        each."""
        tokens = padding if tokens is None else tokens
        slots = []
        for row, count in enumerate(counts):
            for token in range(self.lengths[row], self.lengths[row] + count):
                slots.append(int(self.table[row, token // self.block]) * self.block + token % self.block)
            self.lengths[row] += count
        starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int()
        lengths = torch.tensor([*self.lengths, *[0] * padding], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(lengths),
            num_actual_tokens=len(slots) + tokens,
            max_query_len=max(counts),
            max_seq_len=max(self.lengths),
            block_table_tensor=torch.cat((self.table, self.table.new_zeros(padding, self.table.shape[1]))),
            slot_mapping=torch.tensor(slots + [-1] * tokens),
        )


@pytest.mark.parametrize("ratio", [1, 4], ids=["a page per block", "4 pages per block"])
def test_kernels_read_what_the_definition_says(config, ratio):
    """Of prompts, of chunks beside requests that decode, and of requests that decode, over the ends of pages."""
    gpu, definition = (Device(config, gpu, ratio) for gpu in (True, False))
    requests = Requests(ratio)
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    kept = set()
    for counts in ([1, 1, 21], [1, 14, 9], [1, 1, 1], [1, 1, 1], [1, 1, 5], [1, 1, 1]):
        decodes = max(counts) == 1
        tokens = sum(counts) + decodes  # and a row of padding, where a CUDA graph would run
        q, k, v = (randn(tokens, heads, DIMS).half() for heads in (KV_HEADS * RATIO, KV_HEADS, KV_HEADS))
        before = list(requests.lengths)
        padded = requests.step(counts, padding=1 if decodes else 0)
        requests.lengths = before
        plain, real = requests.step(counts), sum(counts)
        found = gpu.run(requests, padded, q, k, v)[:real]
        expected = definition.run(requests, plain, q[:real], k[:real], v[:real])
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=1e-2)
        tokens, step = gpu.steps[0]
        if decodes:
            assert (tokens, len(gpu.steps)) == (slice(0, 4), 1)
            kept.add((step.table.data_ptr(), step.starts.data_ptr(), step.rings.data_ptr()))
    assert len(kept) == 1, "a CUDA graph reads where the first step lay"


@pytest.mark.parametrize(
    ("config", "queries"), [(0, 8), (OPEN, 1), (OPEN, 8)], indirect=["config"], ids="block={}".format
)
def test_tokens_taken_back_leave_no_trace(config, queries, monkeypatch):
    """Drafts are rejected, some of them behind the end of a page. The kernels read what the definition reads, which
    never saw them. The kernel that decodes may take as many queries, or not."""
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=3)
    gpu, definition = (Device(config, gpu) for gpu in (True, False))
    kernels = KERNELS._replace(extend=Choice("unpacked", "", unpacked_prefill.attend))
    gpu.layer.ops = kernels._replace(decode=kernels.decode._replace(queries=queries))
    drafted, accepted = Requests(1), Requests(1)
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    graph = Graph(gpu, monkeypatch)
    for counts, kept, run in (
        ([1, 13, 30], [1, 13, 30], gpu.run),
        ([1, 3, 4], [1, 1, 2], gpu.run),  # two tokens of a request are taken back, and of another one tokens 32 and 33
        ([4, 4, 4], [2, 3, 1], graph.capture),
        ([4, 4, 4], [1, 1, 4], graph.replay),
        ([3, 2, 9], [1, 1, 9], gpu.run),  # beside a chunk
        ([1, 1, 1], [1, 1, 1], gpu.run),
    ):
        padding = 0 if run == gpu.run else 1  # a request of 4 tokens
        tokens = sum(counts) + 4 * padding
        q, k, v = (randn(tokens, heads, DIMS).half() for heads in (KV_HEADS * RATIO, KV_HEADS, KV_HEADS))
        rows = torch.cat([torch.arange(n) < m for n, m in zip(counts, kept, strict=True)]).nonzero().squeeze(1)
        found = run(drafted, drafted.step(counts, padding, 4 * padding), q, k, v)[rows]
        expected = definition.run(accepted, accepted.step(kept), q[rows], k[rows], v[rows])
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=1e-2)
        drafted.lengths = list(accepted.lengths)


def test_layers_that_vllm_gives_to_another_backend_are_refused(config):
    Device(config, gpu=False)
    del config.compilation_config.static_forward_context["model.layers.1.self_attn.attn"]
    with pytest.raises(ValueError, match=r"vLLM gives layers 1 to another backend, .* 16 bits: serve this model with"):
        engine.check_layers(config)
    engine.Engine.current = None
    with pytest.raises(ValueError, match="vLLM gives layers 0, 1 to another backend"):
        engine.check_layers(config)


def test_flash_attention_3_has_the_arguments_that_it_is_given():
    """It can be imported on a GPU only. So its arguments are read from its source."""
    source = Path(vllm.__file__).parent / "vllm_flash_attn/flash_attn_interface.py"
    functions = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)}
    given = {}

    def recorded(q, k, v, **options):
        given.update(options)
        return q, q[..., 0].T

    numbers = partial(torch.tensor, dtype=torch.int32)
    ends = Ends(numbers([0, 2]), numbers([0, 3]), 2, 3, causal=True)
    pages = Paged(numbers([0, 2]), 2, numbers([3]), 3, numbers([[0]]))
    library = Library(VLLM, SimpleNamespace(flash_attn_varlen_func=recorded))
    for reach in (ends, pages):
        library.attend(torch.zeros(2, 1, 8), *torch.zeros(2, 128, 1, 8), 1.0, reach)
    first, *others = (argument.arg for argument in functions["flash_attn_varlen_func"].args.args)
    assert (first, *others[:2]) == ("q", "k", "v")
    assert given.keys() <= set(others[2:])
    assert [argument.arg for argument in functions["is_fa_version_supported"].args.args] == ["fa_version"]
