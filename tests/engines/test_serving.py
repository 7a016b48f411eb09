"""What serving engines share: configuration, plans, and layers that attend over an engine's own pages."""

import logging
import random
from datetime import date
from unittest.mock import Mock

import pytest
import torch
from packed_reads import packed_and_read
from random_layers import fitted
from recorded_graphs import KERNELS

from kvfold.artifact import Artifact, CheckResult, Measure
from kvfold.bench.random_fits import random_artifact
from kvfold.engines import faults as fault_module
from kvfold.engines.faults import FaultLog, Faults
from kvfold.engines.serving import Config, Plan, Served
from kvfold.geometry import Geometry, UnsupportedModel
from kvfold.ops.attend import unpacked_prefill as unpacked
from kvfold.ops.dispatch import Ops, choose
from kvfold.ops.pages import HostLengths, Logits, Step
from kvfold.recipes import parse

pytestmark = pytest.mark.usefixtures("_poisoned_memory")

KV_HEADS, RATIO, DIMS, PAGE = 2, 3, 64, 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 384,
}


# Configuration


def test_nothing_asks_for_kvfold_by_itself(monkeypatch):
    monkeypatch.delenv("KVFOLD_RECIPE", raising=False)
    assert Config.read() is None


def test_the_environment_or_the_engine_asks_for_it(monkeypatch):
    monkeypatch.setenv("KVFOLD_RECIPE", "saw-int4")
    monkeypatch.setenv("KVFOLD_ARTIFACT", "fits")
    assert Config.read() == Config(parse("saw-int4"), "fits")
    assert Config.read({"recipe": "int2"}) == Config(parse("int2"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"recipe": "saw-int5"}, "unknown recipe 'saw-int5': did you mean 'saw-int4'"),
        ({"recipe": "int4", "window": 3}, "not by window"),
        ({"artifact": "fits"}, "needs a recipe"),
    ],
)
def test_configurations_that_are_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        Config.read(given)


# Plans


def plan(recipe, model=MODEL, page_size=PAGE, **options):
    return Plan.make(Config(parse(recipe), **options), model, page_size, torch.bfloat16)


def test_bytes_of_a_token():
    # 64 numbers of 4 bits, a scale and an offset; keys and values, 2 KV heads, 2 layers
    assert plan("int4:centre=false").token_bytes == (32 + 4) * 2 * 2 * 2
    assert plan("int4:centre=false").raw_token_bytes == 64 * 2 * 2 * 2 * 2
    assert plan("int4:centre=false,skip=1").token_bytes == (32 + 4) * 2 * 2 + 64 * 2 * 2 * 2


def test_the_report_says_what_is_served():
    report = plan("int4:block=16,centre=false,skip=1").report(pages=100)
    for part in ("int4:block=16,centre=false,skip=1", "1 packed, 1 in 16 bits", "1,600 tokens fit"):
        assert part in report
    # 16 tokens and 16 drafts; keys and values of 2 heads with 64 numbers of 16 bits
    ring = 32 * 2 * 2 * 64 * 2 / 2**20
    assert f"open block: up to 16 tokens of a running request in 16 bits, {ring:,.1f} MiB" in report
    assert "H200" not in report


def test_reserved_open_blocks_count():
    """A token takes 288 bytes packed and 1024 in 16 bits, a ring those of 32 tokens in 16 bits."""
    tokens = 100 * PAGE
    served = plan("int4:centre=false,block=16")
    assert served.compression(8, tokens) == pytest.approx(1024 * tokens / (288 * tokens + 8 * 32 * 1024))


def test_the_report_says_what_was_checked(tmp_path):
    """The check of the whole artifact counts for every rank."""
    assert "not checked: run `kvfold check MODEL --recipe int4:centre=false`" in plan("int4:centre=false").report(8)
    recipe = parse("oscar-int2:block=16")
    artifact = random_artifact(MODEL, [recipe])
    artifact.save(tmp_path)
    unchecked = plan(str(recipe), artifact=str(tmp_path)).report(8)
    assert f"not checked: run `kvfold check MODEL --recipe {recipe} --artifact {tmp_path}`" in unchecked
    named = plan("int4:centre=false", MODEL | {"_name_or_path": "my model"}).report(8)
    assert "not checked: run `kvfold check 'my model' --recipe int4:centre=false`" in named
    result = CheckResult(
        context=32768,
        date=date(2026, 11, 17),
        versions={},
        fit_sha256=artifact.fit_sha256(recipe),
        measures=(
            Measure(
                name="KL", unit="nats", value=0.0021, reference=0.0, loss=0.0021, low=0.002, high=0.003, allowed=0.02
            ),
            Measure(
                name="needles", unit="share", value=0.9, reference=0.983, loss=0.083, low=0.04, high=0.2, allowed=0.03
            ),
        ),
    )
    artifact.with_check(recipe, result).save(tmp_path)
    for rank in range(2):
        config = Config(recipe, str(tmp_path))
        report = Plan.make(config, MODEL, PAGE, torch.bfloat16, rank=rank, ranks=2).report(8)
        assert "checked on 2026-11-17 at 32,768 tokens: failed (KL 0.0021, needles 90.0 of 98.3 %)" in report


def test_the_report_names_the_kernels_of_a_gpu():
    pytest.importorskip("triton")
    served = plan("int4:centre=false")
    layouts = served.layouts.items()
    on_gpu = {number: choose(layout, served.ratio, torch.device("cuda"), (9, 0)) for number, layout in layouts}
    served.__dict__["ops"] = on_gpu  # the property is computed once
    report = served.report(pages=100)
    for part in ("store: triton (", "decode: gluon (", "extend: unpacked ("):
        assert part in report


@pytest.mark.parametrize(
    ("recipe", "model", "reason"),
    [
        ("int4", {}, "needs an artifact of the model: run `kvfold calibrate MODEL --recipe int4 --out DIR`, or use"),
        ("fold", {}, "^fold needs an artifact of the model: run `kvfold tune MODEL --bits 3 --out DIR`$"),
        ("kivi-2", {}, r"kivi-2 is for evaluation, .* \(whole pages .*\): serve fold4, fold3 or fold2"),
        ("int4:centre=false,skip=7", {}, "layer 7 cannot be skipped: the packed layers are 0, 1"),
        ("int4:centre=false", {"kv_lora_rank": 512}, "MLA"),
        ("int4:centre=false", {"sliding_window": 4096}, "all its layers are sliding"),
        ("int4:centre=false,group=48", {}, "group=48 does not divide the head dimension 64"),
    ],
)
def test_what_is_refused(recipe, model, reason):
    with pytest.raises(ValueError, match=reason):
        plan(recipe, MODEL | model)


@pytest.mark.parametrize("recipe", ["kmeans-int4:centroids=4", "gtq-k3v3:per_head=true"])
def test_recipes_for_evaluation_are_refused_on_every_rank(recipe, tmp_path):
    """Even where a rank has a single KV head, and with it one layout."""
    random_artifact(MODEL, [parse(recipe)]).save(tmp_path)
    config = Config(parse(recipe), str(tmp_path))
    for ranks in (1, 2):
        with pytest.raises(ValueError, match=f"^{recipe} is for evaluation, as no kernel stores it"):
            Plan.make(config, MODEL, PAGE, torch.bfloat16, ranks=ranks)


def test_what_kernels_cannot_store_is_refused_at_the_start(monkeypatch):
    """As on a GPU, where a kernel would refuse the first token of a float32 model."""
    monkeypatch.setattr("kvfold.engines.serving.choose", lambda *_, **__: KERNELS)
    config = Config(parse("int4:centre=false"))
    with pytest.raises(ValueError, match=r"the model is in torch.float32: .* --dtype bfloat16"):
        Plan.make(config, MODEL, PAGE, torch.float32)
    assert Plan.make(config, MODEL, PAGE, torch.float16).ops == {0: KERNELS, 1: KERNELS}


def test_refusals_of_models_say_what_they_are():
    with pytest.raises(UnsupportedModel):
        plan("int4:centre=false", MODEL | {"is_encoder_decoder": True})


def test_a_folder_that_is_no_artifact(tmp_path):
    with pytest.raises(ValueError, match=r"is no artifact: there is no kvfold\.json in it"):
        plan("int4", artifact=str(tmp_path))


# Layers


def random_plan(recipe):
    recipe = parse(recipe)
    codecs = {0: recipe.codecs(DIMS, DIMS, fitted(str(recipe), DIMS, KV_HEADS))}
    geometry = Geometry.uniform("any", 1, KV_HEADS * RATIO, KV_HEADS, DIMS)
    return Plan(recipe, geometry, KV_HEADS, RATIO, codecs, PAGE, torch.bfloat16, torch.device("cpu"))


class World:
    """An engine with one layer: requests of random tokens in pages of random order, and every key and value kept."""

    dtype, error = torch.float32, {"atol": 2e-5, "rtol": 1e-4}

    def __init__(self, recipe, requests, pages=64, seed=0):
        self.plan = random_plan(recipe)
        self.served = Served(self.plan, logging.getLogger())
        self.served.open(pages)
        pool = torch.empty(pages, KV_HEADS, self.plan.layouts[0].page_bytes, dtype=torch.uint8)
        self.layer = self.served.attach(0, pool, self.plan.allocate_rings(0, requests + 3).fill_(torch.nan))
        self.rings = torch.randperm(requests + 3, generator=torch.Generator().manual_seed(seed))[:requests, None]
        self.generator = torch.Generator().manual_seed(seed)
        self.free = random.Random(seed).sample(range(pages), pages)
        self.held = [[] for _ in range(requests)]
        self.keys = [torch.empty(0, KV_HEADS, DIMS) for _ in range(requests)]
        self.values = [torch.empty(0, KV_HEADS, DIMS) for _ in range(requests)]

    def randn(self, tokens, heads):
        return (torch.randn(tokens, heads, DIMS, generator=self.generator) + 0.3).to(self.dtype)

    def step(self, *counts, poisoned=None):
        """Check the output of each request against what it has to be, and return all of them. The `poisoned` token of
        the step holds NaN and Inf in some heads of its key and value."""
        starts = [len(keys) for keys in self.keys]
        for row, count in enumerate(counts):
            while len(self.held[row]) * PAGE < starts[row] + count:
                self.held[row].append(self.free.pop())
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        table = torch.zeros(len(counts), max(map(len, self.held)) + 1, dtype=torch.int32)
        locations = []
        for row, pages in enumerate(self.held):
            table[row, : len(pages)] = torch.tensor(pages)
            locations += [pages[t // PAGE] * PAGE + t % PAGE for t in range(starts[row], lengths[row])]
        numbers = torch.tensor(starts).int(), torch.tensor(lengths).int()
        described = (torch.tensor(locations), *numbers, table, self.rings)
        q = self.randn(sum(counts), KV_HEADS * RATIO)
        k, v, out = self.randn(sum(counts), KV_HEADS), self.randn(sum(counts), KV_HEADS), torch.full_like(q, torch.nan)
        steps = self.served.steps(HostLengths(starts, lengths), *described)
        for _, step in steps:  # slices of the whole are what each step is by itself
            by_itself = Step.of(step.host, step.table, step.rings, PAGE)
            for name, tensor in vars(by_itself).items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(getattr(step, name), tensor)
        given = k.clone(), v.clone()
        if poisoned is not None:
            for side, (codec, x, kept) in enumerate(zip(self.plan.codecs[0], given, (k, v), strict=True)):
                x[poisoned, side:, 7] = (torch.nan, -torch.inf)[side]
                kept[poisoned, side:] = codec.transform.mean[side:].to(self.dtype)
        self.layer.attend(steps, q, *given, Logits(DIMS**-0.5), out)
        attended = [(q, out)]
        if self.layer.shared:
            others, found = self.randn(sum(counts), KV_HEADS * RATIO), torch.full_like(q, torch.nan)
            self.layer.read(steps, others, Logits(DIMS**-0.5), found)
            attended.append((others, found))
        for row, (new_k, new_v) in enumerate(zip(k.split(counts), v.split(counts), strict=True)):
            self.keys[row] = torch.cat((self.keys[row], new_k.float()))
            self.values[row] = torch.cat((self.values[row], new_v.float()))
        for all_queries, outputs in attended:
            for row, (queries, found) in enumerate(zip(all_queries.split(counts), outputs.split(counts), strict=True)):
                for i, query in enumerate(queries):
                    expected = self.defined(row, starts[row] + i, starts[row], query.float())
                    torch.testing.assert_close(found[i].float(), expected, **self.error)
        return out

    def defined(self, row, position, start, query):
        """Attention of one query in float64, with every token read as the definition says."""
        sides, block = [], self.plan.block
        for codec, x in zip(self.plan.codecs[0], (self.keys[row], self.values[row]), strict=True):
            y = codec.transform.forward(x[: position + 1])
            packed = packed_and_read(codec, x[: position + 1], torch.arange(position + 1))
            for j in range(position + 1):
                if block and j // block == position // block:
                    packed[j] = y[j].bfloat16()
            sides.append(packed.double())
        key, value = self.plan.codecs[0]
        turned = key.transform.dual(query).double().unflatten(0, (KV_HEADS, RATIO))
        weights = torch.softmax(DIMS**-0.5 * torch.einsum("hgd,jhd->hgj", turned, sides[0]), -1)
        return value.transform.inverse(torch.einsum("hgj,jhd->hgd", weights, sides[1]).flatten(0, 1).float())


RECIPES = (
    "saw-int4",
    "int2",
    "gtq-k3v3",
    "int2:block=16",
    "oscar-int2:block=16",
    "int4",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ragged_batches_read_what_the_definition_says(recipe):
    world = World(recipe, requests=4)
    for counts in ((33, 1, 0, 17), (1, 1, 0, 1), (1, 40, 5, 1), (2, 2, 2, 2), (1, 1, 1, 60), *[(1, 1, 1, 1)] * 3):
        world.step(*counts)


class WorldOfKernels(World):
    """With the kernels of GPUs, interpreted, and their steps."""

    dtype, error = torch.float16, {"atol": 2e-2, "rtol": 2e-2}

    def __init__(self, recipe, requests, **options):
        super().__init__(recipe, requests, **options)
        self.layer.ops = KERNELS._replace(extend=KERNELS.extend._replace(run=unpacked.attend))


@pytest.mark.parametrize("world", [World, WorldOfKernels])
@pytest.mark.parametrize("recipe", ["saw-int4", "int2:block=16"])
def test_another_layer_reads_what_a_shared_one_stores(recipe, world):
    """In the same step: tokens that are packed, raw, and in the open block of the step itself."""
    world = world(recipe, requests=3)
    world.layer.shared = True
    for counts in ((26, 1, 0), (1, 1, 3), (1, 1, 1)):
        world.step(*counts)


def test_what_is_not_shared_is_not_kept():
    world = World("int4", requests=1)
    world.step(3)
    with pytest.raises(AssertionError, match="kept for layers that are shared"):
        world.layer.read([], torch.empty(0), Logits(1.0), torch.empty(0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_take_ragged_batches(recipe, monkeypatch):
    """Of which some have long prompts, which are unpacked, others short ones or drafts beside them, and some decode."""
    monkeypatch.setattr(unpacked, "MIN_QUERIES", 20)
    monkeypatch.setattr(unpacked, "dequantize", (dequantize := Mock(wraps=unpacked.dequantize)))
    world = WorldOfKernels(recipe, requests=4)
    for counts in ((6, 1, 45, 5), (1, 9, 2, 20), (1, 1, 12, 1)):
        world.step(*counts)
    assert dequantize.called


def test_the_first_step_is_stored_last_and_reads_first():
    """Decoding begins while its own step is being stored, which begins when all before it are there."""
    world, calls = World("int4", requests=3), []
    world.step(20, 1, 1)
    store, decode, extend = world.layer.ops

    def recorded(name, choice):
        return choice._replace(
            run=lambda pages, *given: calls.append((name, pages.step.max_queries)) or choice.run(pages, *given)
        )

    world.layer.ops = Ops(recorded("store", store), recorded("attend", decode), recorded("attend", extend))
    world.step(1, 1, 17)
    assert calls == [("store", 17), ("store", 1), ("attend", 1), ("attend", 17)]


def test_a_page_holds_whole_blocks():
    """Otherwise a prefix hit would end inside a block, whose raw tokens nobody has."""
    assert plan("int4:block=8,centre=false").block == 8
    with pytest.raises(ValueError, match=r"block=24.*: prefix hits end at pages of 16 tokens, .* pages of a multiple"):
        plan("int4:block=24,centre=false")


def test_a_ring_is_used_again_without_being_cleared():
    """The next request finds vectors of the last one in it."""
    world = World("int2:block=16", requests=2)
    world.step(23, 9)
    world.held[0], world.keys[0], world.values[0] = [], world.keys[0][:0], world.values[0][:0]
    for counts in ((5, 1), (1, 1), (30, 1), (1, 1)):
        world.step(*counts)


# Numbers that cannot be stored


@pytest.mark.parametrize("recipe", ["saw-int4", "int2:block=4"])
def test_what_one_request_cannot_store_changes_nothing_for_others(recipe):
    """In prompts and in decoding. To its own request it is the mean, now and later."""
    outs = [[], []]
    for bad, found in zip((False, True), outs, strict=True):
        world = World(recipe, requests=3)
        for counts, poisoned in (((5, 7, 9), 8), ((1, 1, 1), 1), ((1, 3, 1), 3), ((1, 1, 1), None)):
            out = world.step(*counts, poisoned=poisoned if bad else None)
            found += [part for row, part in enumerate(out.split(counts)) if row != 1]
        world.served.faults.count()
        assert world.served.faults.count() == 3 * bad
    assert all(map(torch.equal, *outs))


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_tokens_that_cannot_be_stored_are_counted_and_told_once_a_minute(monkeypatch):
    logger, log, now = logging.getLogger("test"), Log(), [100.0]
    logger.addHandler(log)
    monkeypatch.setattr(fault_module, "monotonic", lambda: now[0])
    faults, told_by = Faults(64, torch.device("cpu")), FaultLog(logger)
    assert faults.count() == 0
    for seconds, locations, counted, told in (
        (0, [3, 9], 0, None),  # what is counted now is seen by the next call
        (1, [3], 2, 2),  # a location that has another token now
        (1, [], 3, None),
        (58, [10, 11], 3, None),
        (1, [], 5, 3),
        (90, [], 5, None),
    ):
        now[0] += seconds
        faults.marks[locations] = 1
        assert faults.count() == counted
        told_by.tell(counted)
        assert [line.split("keys or values of ")[1].split()[0] for line in log.lines] == ([str(told)] if told else [])
        log.lines.clear()


# Tensor parallelism


def test_ranks_hold_their_own_heads(tmp_path, embedded):
    from kvfold.calibration import calibrate

    model, _ = embedded
    tokens = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0))
    recipe = parse("oscar-int2:block=16")
    calibrate(model, tokens, 64, [recipe]).save(tmp_path)
    whole = Artifact.load(tmp_path)
    config, given = Config(recipe, str(tmp_path)), model.config.to_dict()
    for rank, ranks, heads in ((0, 3, [0]), (2, 3, [2]), (4, 6, [2]), (0, 1, [0, 1, 2])):
        part = Plan.make(config, given, PAGE, torch.float32, rank=rank, ranks=ranks)
        assert part.kv_heads == len(heads)
        key, _ = part.codecs[5]
        torch.testing.assert_close(key.transform.mean, whole.tensors["key_mean"][5, heads])
        first = key.transform.inverse(key.first)
        torch.testing.assert_close(first, whole.tensors["key_first"][5, heads], rtol=1e-4, atol=1e-4)


def test_an_artifact_of_another_model_is_refused(tmp_path, embedded):
    from kvfold.calibration import calibrate

    model, _ = embedded
    calibrate(model, torch.arange(64), 64, []).save(tmp_path)
    with pytest.raises(ValueError, match="made for another model: its layers is 30, the model's is 2"):
        plan("int4", artifact=str(tmp_path))
