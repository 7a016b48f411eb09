"""The transformers engine, with real models: the embedded one, and tiny random ones of other shapes."""

import pickle
from copy import deepcopy
from threading import Thread

import pytest
import torch
from batch_invariance import batch_invariant
from page_views import key_views, value_views
from recorded_graphs import KERNELS
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvfold
from kvfold.geometry import UnsupportedModel
from kvfold.recipe import PAGE_SIZE
from kvfold.recipes import parse

PROMPTS = (
    "The capital of France is Paris. The capital of Germany is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small boat on a wide river. Every morning the boat",
)


def tiny(kind=LlamaForCausalLM, config=LlamaConfig, q_heads=4, kv_heads=2, head_dim=64, layers=2, **options):
    torch.manual_seed(0)
    model = kind(
        config(
            vocab_size=97,
            hidden_size=q_heads * head_dim,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=q_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=512,
            **options,
        )
    )
    return model.eval()


def means(model, seed=0, recipe="bf16"):
    """An artifact for a tiny model: means of random text, and what a recipe learns from it."""
    tokens = torch.randint(0, 97, (64,), generator=torch.Generator().manual_seed(seed))
    return kvfold.calibrate(model, tokens, context=64, recipes=[parse(recipe)])


def random_tokens(n, batch=1, seed=1):
    return torch.randint(0, 97, (batch, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model, tokens, cache, chunks=None, **options):
    """Logits of all tokens, fed in chunks of the given sizes."""
    parts = tokens.split(chunks, dim=1) if chunks else (tokens,)
    return torch.cat([model(part, past_key_values=cache, **options).logits for part in parts], dim=1)


def generate(model, inputs, cache, **options):
    return model.generate(**inputs, past_key_values=cache, do_sample=False, **options)


@pytest.fixture
def small_caches(small_model, small_artifact):
    """Makes n empty caches for the small model."""
    artifact = kvfold.Artifact.load(small_artifact)
    return lambda recipe, n: [kvfold.cache(small_model, recipe, artifact) for _ in range(n)]


# The 16-bit recipe: the machinery alone


def test_sixteen_bit_cache_generates_what_transformers_generates(embedded):
    model, tokenizer = embedded
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        expected = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=17)
        assert torch.equal(generate(model, inputs, kvfold.cache(model, "bf16"), max_new_tokens=17), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_model_loses_nothing(dtype):
    """K and V of a 16-bit model fit the 16-bit cache exactly, so only the order of float32 sums differs."""
    model = tiny().to(dtype)
    tokens = random_tokens(50)
    expected = logits_of(model, tokens, DynamicCache(config=model.config))
    packed = kvfold.cache(model, "bf16")
    assert packed.raw_dtype == dtype
    error = (logits_of(model, tokens, packed) - expected).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("chunks", [None, 1, 7, 33])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_every_way_of_feeding_matches_plain_transformers(q_heads, kv_heads, chunks):
    model = tiny(q_heads=q_heads, kv_heads=kv_heads, head_dim=32)
    tokens = random_tokens(70)
    expected = logits_of(model, tokens, DynamicCache(config=model.config))
    assert torch.allclose(logits_of(model, tokens, kvfold.cache(model, "bf16"), chunks), expected, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config), (LlamaForCausalLM, LlamaConfig)],
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_architectures_and_head_dims(kind, config, head_dim):
    """int8 with means is close to 16 bits on every architecture and head dimension."""
    model = tiny(kind, config, head_dim=head_dim)
    tokens = random_tokens(40)
    expected = logits_of(model, tokens, DynamicCache(config=model.config))
    for recipe in ("int8", "int8:block=5"):
        got = logits_of(model, tokens, kvfold.cache(model, recipe, means(model)), chunks=9)
        assert (got - expected).abs().max() < 0.02 * expected.abs().max()


def test_calls_may_record_gradients_or_not():
    """Steps in any mode go on from those in another, and what follows attention can be differentiated."""
    model = tiny()
    tokens = random_tokens(40)
    cache, other = (kvfold.cache(model, "int4:block=5", means(model)) for _ in range(2))
    parts, modes = [], (torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad)
    with batch_invariant():
        expected = logits_of(model, tokens, other)
        for part, mode in zip(tokens.split(10, dim=1), modes, strict=True):
            with mode():
                parts.append(model(part, past_key_values=cache).logits)
    assert torch.equal(torch.cat([part.detach() for part in parts], dim=1), expected)
    parts[0].sum().backward()
    assert model.model.layers[0].self_attn.o_proj.weight.grad.abs().sum() > 0


# Packed recipes: how tokens are fed changes nothing


def live_bytes(packed):
    """What is packed of all tokens, of each layer."""
    tokens = torch.arange(packed.paged.lengths[0])
    page, offset = packed.paged.step.table[0, tokens // PAGE_SIZE], tokens % PAGE_SIZE
    views = [
        view
        for layout, pool in zip(packed.paged.layouts, packed.paged.pools, strict=True)
        for view in (*key_views(layout, pool), *value_views(layout, pool))
    ]
    return [view[page, :, offset].contiguous().view(torch.uint8) for view in views]


@pytest.mark.parametrize("recipe", ["saw-int4", "saw-int4:block=32", "oscar-int2:block=40", "gtq-k3v3"])
def test_feeding_through_a_whole_model(small_model, small_caches, words, recipe):
    """At once, in chunks, some one by one: not a byte and not a bit of the logits differs."""
    tokens, ways = torch.tensor([words[:140]]), (None, 37, [1] * 20 + [59, 61])
    caches = small_caches(recipe, len(ways))
    with batch_invariant():
        logits = [logits_of(small_model, tokens, cache, way) for cache, way in zip(caches, ways, strict=True)]
    for cache, found in zip(caches, logits, strict=True):
        assert torch.equal(found, logits[0])
        assert all(torch.equal(*both) for both in zip(live_bytes(cache), live_bytes(caches[0]), strict=True))


# Batches, beams, assistants


@pytest.mark.parametrize("recipe", ["bf16", "saw-int4", "saw-int4:block=8", "gtq-k3v3", "kivi-4:block=5"])
def test_left_padded_rows_are_as_if_alone(recipe):
    model = tiny()
    artifact = means(model, recipe=recipe)
    lengths, longest = (5, 23, 40), 40
    rows = [random_tokens(length, seed=length) for length in lengths]
    tokens = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    ways = ([40], [11, 20, 9], [1] * 40)
    alone, together = ([kvfold.cache(model, recipe, artifact) for _ in each] for each in (lengths, ways))
    with batch_invariant():
        expected = [logits_of(model, row, cache)[0] for row, cache in zip(rows, alone, strict=True)]
        for sizes, cache in zip(ways, together, strict=True):
            logits, end = [], 0
            for size in sizes:
                begin, end = end, end + size
                options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
                logits.append(logits_of(model, tokens[:, begin:end], cache, **options))
            assert cache.paged.lengths == list(lengths)  # padding is not stored
            for found, own in zip(torch.cat(logits, dim=1), expected, strict=True):
                assert torch.equal(found[-len(own) :], own)


def test_padded_generation_equals_single_generation(small_model, small_caches, words):
    prompts = (words[:31], words[100:107], words[200:220])
    inputs = {
        "input_ids": torch.tensor([[0] * (31 - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (31 - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
    options = {"min_new_tokens": 12, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    cache, *others = small_caches("int4:block=5", 4)
    with batch_invariant():
        batch = generate(small_model, inputs, cache, **options)
        for row, (prompt, cache) in enumerate(zip(prompts, others, strict=True)):
            single = generate(small_model, {"input_ids": torch.tensor([prompt])}, cache, **options)
            assert torch.equal(batch.sequences[row, -12:], single.sequences[0, -12:])
            assert torch.equal(torch.stack(batch.logits)[:, row], torch.stack(single.logits)[:, 0])


def test_beam_search_equals_transformers(embedded):
    model, tokenizer = embedded
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    expected = generate(model, inputs, DynamicCache(config=model.config), max_new_tokens=12, num_beams=3)
    assert torch.equal(generate(model, inputs, kvfold.cache(model, "bf16"), max_new_tokens=12, num_beams=3), expected)


def test_beam_search_over_packed_pages_equals_a_copying_cache():
    """Beams share pages and copy on write; the same search over a cache that is copied for every beam agrees."""
    model = tiny()
    tokens, artifact = random_tokens(21), means(model)
    order = [torch.tensor(beams) for beams in ([0, 0, 0], [2, 0, 0], [1, 1, 2], [0, 2, 1])]
    shared, *others = (kvfold.cache(model, "saw-int4:block=5", artifact) for _ in range(1 + 3 * len(order)))
    histories = [tokens[0].tolist()] * 3
    with batch_invariant():
        logits_of(model, tokens.expand(3, -1), shared)
        for step, beams in enumerate(order):
            shared.reorder_cache(beams)
            new = torch.tensor([[step], [step + 10], [step + 20]])
            got = logits_of(model, new, shared)
            histories = [[*histories[beam], int(token)] for beam, token in zip(beams, new, strict=True)]
            for row, history in enumerate(histories):
                expected = logits_of(model, torch.tensor([history]), others.pop())[0, -1]
                assert torch.equal(got[row, 0], expected)


@pytest.mark.parametrize("recipe", ["bf16", "saw-int4", "saw-int4:block=16"])
def test_assisted_decoding_crops_rightly(small_model, small_caches, words, recipe, monkeypatch):
    """Prompt lookup proposes tokens and takes rejected ones back: the text must be that of plain greedy decoding."""
    inputs, options = {"input_ids": torch.tensor([words[:4] * 5])}, {"min_new_tokens": 24, "max_new_tokens": 24}
    (cache, other), removed = small_caches(recipe, 2), []
    crop = cache.crop
    monkeypatch.setattr(cache, "crop", lambda tokens: (removed.append(-tokens), crop(tokens)))
    with batch_invariant():
        got = generate(small_model, inputs, cache, prompt_lookup_num_tokens=4, **options)
        assert torch.equal(got, generate(small_model, inputs, other, **options))
    assert sum(removed) > 0


@pytest.mark.parametrize("recipe", ["bf16", "saw-int4:block=16"])
def test_chunked_prefill_in_generate(small_model, small_caches, words, recipe):
    inputs, options = {"input_ids": torch.tensor([words[:33]])}, {"min_new_tokens": 8, "max_new_tokens": 8}
    cache, other = small_caches(recipe, 2)
    with batch_invariant():
        got = generate(small_model, inputs, cache, prefill_chunk_size=5, **options)
        assert torch.equal(got, generate(small_model, inputs, other, **options))


# Refusals


def test_refusals():
    model = tiny()
    artifact = means(model)
    packed = kvfold.cache(model, "saw-int4", artifact)
    tokens = random_tokens(12, batch=2)
    right = torch.ones_like(tokens)
    right[0, -3:] = 0
    with pytest.raises(ValueError, match="left"), torch.no_grad():
        model(tokens, attention_mask=right, past_key_values=packed)
    with pytest.raises(ValueError, match="a mask of four dimensions only if it is boolean"), torch.no_grad():
        model(tokens, attention_mask=torch.zeros(2, 1, 12, 12), past_key_values=packed)
    with torch.no_grad():
        model(tokens, past_key_values=packed)
    with pytest.raises(ValueError, match=r"four dimensions .* only in the first step"), torch.no_grad():
        model(tokens, attention_mask=torch.ones(2, 1, 12, 24, dtype=torch.bool), past_key_values=packed)
    assert packed.get_seq_length() == 12
    hole = torch.ones(2, 13, dtype=torch.long)
    hole[1, :4] = 0  # tokens that the cache already holds
    with pytest.raises(ValueError, match="left"), torch.no_grad():
        model(tokens[:, :1], attention_mask=hole, past_key_values=packed)
    with pytest.raises(ValueError, match="holds 2 sequences"), torch.no_grad():
        model(tokens[:1], past_key_values=packed)
    with pytest.raises(ValueError, match="another model: its weights"):
        kvfold.cache(
            tiny(rms_norm_eps=1e-3).apply(lambda m: torch.nn.init.ones_(m.weight) if hasattr(m, "weight") else None),
            "saw-int4",
            artifact,
        )
    with pytest.raises(ValueError, match="pass artifact"):
        kvfold.cache(tiny(), "saw-int4")
    with pytest.raises(UnsupportedModel, match="all its layers are sliding"):
        kvfold.cache(tiny(MistralForCausalLM, MistralConfig, sliding_window=16), "int4:centre=false")
    with pytest.raises(ValueError, match="order=3"):
        kvfold.cache(model, "saw-int4:order=3", artifact)


def test_what_kernels_cannot_store_is_refused_before_calibration(monkeypatch):
    """As on a GPU, where a kernel would refuse the first token of a float32 model."""
    monkeypatch.setattr("kvfold.engines.transformers.choose", lambda *_, **__: KERNELS)
    with pytest.raises(ValueError, match=r"the model is in torch.float32: load it with dtype=torch.bfloat16"):
        kvfold.cache(tiny(), "saw-int4")
    assert kvfold.cache(tiny().half(), "saw-int4:centre=false").raw_dtype == torch.float16


def test_a_step_that_fails_leaves_nothing_behind():
    model = tiny()
    artifact = means(model)
    packed = kvfold.cache(model, "saw-int4", artifact)
    tokens = random_tokens(30)
    first, second = tokens.split(20, dim=1)
    with batch_invariant():
        logits_of(model, first, packed)
    weight = model.model.layers[1].self_attn.k_proj.weight
    saved = weight.detach().clone()
    weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        logits_of(model, second, packed)
    weight.data.copy_(saved)
    assert packed.get_seq_length() == 20
    other = kvfold.cache(model, "saw-int4", artifact)
    with batch_invariant():
        assert torch.equal(logits_of(model, second, packed), logits_of(model, tokens, other)[:, 20:])


@pytest.mark.parametrize("recipe", ["gtq-k3v3:block=7", "kivi-4"])
def test_a_copy_goes_on_as_the_original(recipe):
    model, tokens = tiny(), random_tokens(60)
    packed = kvfold.cache(model, recipe, means(model, recipe=recipe))
    logits_of(model, tokens[:, :50], packed)
    copied = deepcopy(packed)
    assert torch.equal(logits_of(model, tokens[:, 50:], copied), logits_of(model, tokens[:, 50:], packed))
    assert (copied.get_seq_length(), packed.get_seq_length()) == (60, 60)
    with pytest.raises(TypeError, match=r"^a packed cache cannot be pickled: keep its tokens"):
        pickle.dumps(packed)


def in_thread(call):
    """What a call raises in another thread, or None."""
    raised: list[Exception | None] = [None]

    def run():
        try:
            call()
        except Exception as error:
            raised[0] = error

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


def test_two_threads_in_one_cache_are_refused():
    model, tokens = tiny(), random_tokens(20)
    packed, others = kvfold.cache(model, "int4:centre=false"), []

    def call():
        return logits_of(model, tokens, packed)

    expected = call()
    packed.reset()
    handle = model.model.layers[0].register_forward_hook(lambda *_: others or others.append(in_thread(call)))
    with pytest.raises(ValueError, match="two threads used this cache at once: make one for each thread"):
        call()
    assert "two threads used this cache at once" in str(others[0])
    handle.remove()
    packed.reset()
    assert torch.equal(call(), expected)


def test_threads_may_take_turns_with_a_cache():
    model, tokens = tiny(), random_tokens(30)
    packed, alone = kvfold.cache(model, "int4:centre=false"), kvfold.cache(model, "int4:centre=false")
    logits_of(model, tokens[:, :10], packed)
    with pytest.raises(ValueError, match="hides tokens that are not left padding"):  # a step that fails is over
        model(
            tokens[:, 10:20],
            past_key_values=packed,
            attention_mask=torch.ones(1, 20).index_fill(1, torch.tensor([15]), 0),
        )
    assert in_thread(lambda: logits_of(model, tokens[:, 10:20], packed)) is None
    logits_of(model, tokens[:, 20:], packed)
    for part in tokens.split(10, dim=1):
        logits_of(model, part, alone)
    assert all(map(torch.equal, live_bytes(packed), live_bytes(alone)))


def test_centring_calibrates_itself_once(embedded):
    model, _ = embedded
    first, second = kvfold.cache(model, "int4"), kvfold.cache(model, "saw-int4")
    assert first.codecs[0][0].transform.mean is not None
    assert torch.equal(first.codecs[0][0].transform.mean, second.codecs[0][0].transform.mean)
    assert kvfold.cache(model, "int4:centre=false").codecs[0][0].transform.mean is None


def test_the_mean_key_is_the_mean(embedded):
    """Against the keys of transformers' own cache, in float64."""
    model, tokenizer = embedded
    tokens = tokenizer(PROMPTS[2] * 6, return_tensors="pt").input_ids[0, :100]
    artifact = kvfold.calibrate(model, tokens, context=50)
    layers = []
    for window in tokens.split(50):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(window[None], past_key_values=cache)
        layers.append([layer.keys[0, :, 4:].double() for layer in cache.layers])
    for mean, keys in zip(artifact.tensors["key_mean"], zip(*layers, strict=True), strict=True):
        assert torch.allclose(mean.double(), torch.cat(keys, dim=1).mean(dim=1), atol=1e-5)


def test_pages_that_are_quantized_as_a_whole_have_their_own_size():
    model = tiny()
    with pytest.raises(ValueError, match="kivi-2 quantizes pages of 32 tokens as a whole"):
        kvfold.cache(model, "kivi-2", means(model), page_size=16)
    assert kvfold.cache(model, "kivi-2", means(model), page_size=32).page_size == 32
