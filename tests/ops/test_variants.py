"""How often Triton compiles a kernel anew: it does for integers that are 1 or multiples of 16, and for addresses that
are, unless told not to. A batch that is composed in another way must not be one of those times, nor another layer, nor
the first prompt: a server would stop for seconds.

And whether launches that do not ask Triton run what Triton would have chosen."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json
import logging
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from kvfold.bench.random_fits import random_artifact
from kvfold.engines.serving import Config, Plan, Served
from kvfold.ops.attend import parts
from kvfold.ops.attend.gluon import decode_step as gluon
from kvfold.ops.cards import card_of
from kvfold.ops.attend import attend_gpu as portable
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.attend.flash_attention_3 import SGLANG, Library
from kvfold.ops.dispatch import Choice, Ops
from kvfold.ops.pages import HostLengths, Logits
from kvfold.ops.store import store_gpu as store
from kvfold.recipes import parse

Q_HEADS, KV_HEADS = map(int, sys.argv[1:])
backend, variants = make_backend(GPUTarget("cuda", 90, 32)), defaultdict(set)  # by name and types
compiled = set()  # all that a kernel is compiled for
launched, shortcuts = [], set()  # names of kernels

class Compiled:  # what Triton returns; called again, it must be what Triton would choose
    def __init__(self, kernel, types, options):
        self.kernel, self.types, self.options = kernel, types, options

    def __getitem__(self, grid):
        assert len(grid) == 3, grid
        def launch(*args):
            bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
            _, found, _ = bind(*args, **self.options)
            assert found == self.types, f"{self.kernel.fn.__name__}: {found}, not {self.types}"
            launched.append(self.kernel.fn.__name__)
            shortcuts.add(self.kernel.fn.__name__)
        return launch

def run(kernel, *args, grid, warmup, **options):
    for name in ("debug", "instrumentation_mode", "fpsan_homomorphic_casts"):
        options.setdefault(name, None)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, types, others = bind(*args, **options)
    launched.append(kernel.fn.__name__)
    compiled.add(f"{kernel.fn.__name__} {types} {others}")
    found = {p.name: x for p, x in zip(kernel.params, types, strict=True) if not p.is_constexpr}
    names = " ".join(f"{name}:{x[0]}" for name, x in found.items())
    variants[f"{kernel.fn.__name__} {names}"].add(json.dumps({name: x[1] for name, x in found.items()}))
    return Compiled(kernel, types, others)

JITFunction.run = run
# as on a large GPU, but for flash attention itself
parts.sms = lambda device: 132
unpacked.MOST_TOKENS = 2**17  # blocks of 16 tokens take a page of 128 each
unpacked._operand = lambda device, dtype: dtype
unpacked._torch_attention = lambda q, *_: unpacked.Part(torch.empty_like(q), torch.empty(q.shape[:2]))
def read_all(q, k, v, out=None, **options):  # [n, q_heads, d], or one sequence [1, n, q_heads, d]
    launched.append("FlashAttention 3")
    return torch.empty_like(q) if out is None else out, torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3])

library = Library(SGLANG, SimpleNamespace(flash_attn_varlen_func=read_all, flash_attn_with_kvcache=read_all))
model = dict(model_type="qwen3", num_hidden_layers=2, num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS,
             head_dim=64, hidden_size=64, max_position_embeddings=8192, rope_theta=1e4, vocab_size=100,
             intermediate_size=64)
recipe = parse("oscar-int2:block=64")
with tempfile.TemporaryDirectory() as folder:
    artifact = random_artifact(model, [recipe])
    for side in ("key", "value"):
        artifact.tensors[f"{recipe.fitted_as}/{side}_clip"] = torch.tensor([[0.8], [1.2]])
    artifact.save(Path(folder))
    plan = Plan.make(Config(recipe, folder), model, 64, torch.bfloat16)
engine = Served(plan, logging.getLogger())
engine.open(2048)
layers = [
    engine.attach(number, layout.allocate(2048, KV_HEADS), layout.allocate_ring(1500, 16, KV_HEADS, plan.raw_dtype))
    for number, layout in plan.layouts.items()
]
CARD = card_of((9, 0))
fast = (
    Choice("", "", partial(gluon.attend, CARD)),
    Choice("", "", unpacked.attend),
)
hopper = fast[0], Choice("", "", partial(unpacked.attend, library=library))
slow = Choice("", "", portable.attend), Choice("", "", portable.attend)

def ops(decode, extend):
    card = CARD._replace(overlaps=decode is not slow[0])
    return Ops(Choice("", "", partial(store.store, card)), decode, extend)

def served(requests, kind):
    starts, lengths = ([r[i] for r in requests] for i in (0, 1))
    tokens = sum(lengths) - sum(starts)
    width = max(-(-length // 64) for length in lengths)
    pages = torch.arange(1, 1 + len(requests) * width).view(-1, width)
    k, v = torch.zeros(2, tokens, KV_HEADS, 64, dtype=torch.bfloat16)
    q, out = torch.zeros(2, tokens, Q_HEADS, 64, dtype=torch.bfloat16)
    locations, host = torch.zeros(tokens, dtype=torch.int64), HostLengths(starts, lengths)
    rings = torch.arange(5 * len(requests)).view(-1, 5)
    steps = engine.steps(host, locations, *(torch.tensor(x, dtype=torch.int32) for x in host), pages, rings)
    for layer in layers:
        layer.ops = ops(*kind)
        layer.attend(steps, q, k, v, Logits(0.125), out)

for kind in (fast, hopper):
    layers[0].ops = ops(*kind)
    engine.warm(layers[0])
warm = set(compiled)
batches = (
    [(0, 300)], [(0, 1), (0, 300)], [(5, 6), (7, 8), (9, 2000)], [(0, 1600), (48, 1700)], [(0, 17), (3, 90)],
    [(4, 7), (60, 65)], [(900, 912), (31, 33)], [(1900, 1920), (31, 33)], [(1600, 2408)], [(1600, 1630)],
    [(0, 256)] * 2, [(0, 256)] * 8, [(0, 256)] * 32,
    [(0, 64)] * 5, [(0, 700)] * 3, [(0, 17)] * 120,
)
launches = []
for requests in batches:
    served(requests, fast)
    launched.clear()
    served(requests, hopper)
    counts = [b - a for a, b in requests]
    if min(counts) > 1 and max(counts) > 16:  # requests that decode are apart, and so are drafts
        launches.append((len(requests), launched[len(launched) // 2:]))
new = sorted(compiled - warm)
for count in (1, 3, 300):  # of which graphs are captured
    served([(70, 71)] * count, fast)
for requests in batches:
    served(requests, slow)
print(json.dumps({"variants": {name: sorted(found) for name, found in variants.items()}, "new": new,
                  "launches": launches, "shortcuts": sorted(shortcuts)}))
"""


NAMES = {"_store", "decode", "_attend", "_open_block", "_dequantize", "_rotate", "_merge"}


@pytest.fixture(scope="module", params=[("8", "2"), ("9", "3")], ids=":".join)
def told(request):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", CODE, *request.param]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_batches_of_any_composition_run_the_same_kernels(told):
    variants = told["variants"]
    assert {name.split()[0] for name in variants} >= NAMES
    assert {name: found for name, found in variants.items() if len(found) > 1} == {}


def test_nothing_is_left_to_compile_after_warming_up(told):
    assert told["new"] == []


def test_prompts_of_a_step_are_read_together(told):
    """With FlashAttention 3. A layer launches each kernel once, however many prompts a step has, and however long they
    are. If queries are few, they are rotated, and their outputs back."""
    assert max(count for count, _ in told["launches"]) == 120
    read = ["_store", "_dequantize", "FlashAttention 3"]
    rotated = ["_store", "_rotate", *read[1:], "_rotate"]
    assert {tuple(names) for _, names in told["launches"]} == set(map(tuple, (read, rotated)))


def test_launches_need_not_ask_triton(told):
    """The run has checked that they are what Triton would choose."""
    assert set(told["shortcuts"]) >= NAMES
