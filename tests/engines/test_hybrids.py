"""Models with layers that are not packed: sliding windows, chunks, linear attention, convolutions, shared caches.

The definition is a stock model with transformers' own cache. Its packed layers give each query what the recipe says.
"""

import pytest
import torch
from model_configs import MODELS
from packed_reads import packed_and_read
from tiny_models import HYBRIDS, tiny
from transformers import AutoConfig, Cache, DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

import kvfold
from kvfold.artifact import Artifact
from kvfold.engines.transformers import GROWING, PackedCache
from kvfold.format.codec import Codec
from kvfold.format.open_block import raw_from
from kvfold.geometry import Geometry, UnsupportedModel

WINDOW = 12  # of tiny models
PACKED = "int4:block=5"


def tokens(n: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 97, (batch, n), generator=torch.Generator().manual_seed(seed))


def means(model: PreTrainedModel) -> Artifact:
    return kvfold.calibrate(model, tokens(64, seed=3)[0], context=64)


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, sizes: list[int] | None = None) -> torch.Tensor:
    """Logits of all tokens, fed in parts of the given sizes."""
    parts = ids.split(sizes or [ids.shape[1]], dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


class Defined(DynamicLayer):
    """All keys and values as they came. The query of a step of one token gets what the recipe says."""

    def __init__(self, packed: PackedCache, layer: int) -> None:
        super().__init__()
        self.codecs, self.block = packed.codecs[layer], packed.recipe.block

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_, **__):
        assert key_states.shape[2] == 1
        both = super().update(key_states, value_states)
        return tuple(self.read(codec, x) for codec, x in zip(self.codecs, both, strict=True))

    def read(self, codec: Codec, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[2]
        rows = x.transpose(1, 2).flatten(0, 1)
        j = torch.arange(n).repeat(len(x))
        packed = codec.transform.inverse(packed_and_read(codec, rows, j))
        raw = codec.transform.inverse(codec.transform.forward(rows).bfloat16().float())
        near = j >= raw_from(n - 1, self.block)
        return torch.where(near[:, None, None], raw, packed).unflatten(0, (-1, n)).transpose(1, 2)


class DefinedMixed(LinearAttentionAndFullAttentionLayer, Defined):
    def __init__(self, packed: PackedCache, layer: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self)
        self.codecs, self.block = packed.codecs[layer], packed.recipe.block

    update = Defined.update


def defined(model: PreTrainedModel, packed: PackedCache, ids: torch.Tensor) -> torch.Tensor:
    """The logits by definition, one token at a time."""
    cache = DynamicCache(config=model.config)
    for layer in packed.codecs:
        mixed = type(cache.layers[layer]) is not DynamicLayer
        cache.layers[layer] = (DefinedMixed if mixed else Defined)(packed, layer)
    return logits_of(model, ids, cache, [1] * ids.shape[1])


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request) -> tuple[PreTrainedModel, PreTrainedModel, Artifact]:
    """A model, the same one as stock transformers has it, and means."""
    model, stock = tiny(request.param), tiny(request.param)
    if request.param in ("Gemma2", "GptOss", "MiMoV2Flash"):
        assert stock.config._attn_implementation == "eager"  # SDPA knows neither soft-caps nor sinks
    assert Geometry.from_config(model.config.to_dict()).packed == HYBRIDS[request.param][1]
    return model, stock, means(model)


@pytest.mark.parametrize("recipe", ["bf16", PACKED])
def test_logits_are_those_of_the_definition(hybrid, recipe):
    """In one pass, and in parts that end within pages and within blocks."""
    model, stock, artifact = hybrid
    ids = tokens(41, batch=2)
    exact = logits_of(stock, ids, DynamicCache(config=stock.config))
    packed = kvfold.cache(model, recipe, artifact)
    expected = defined(stock, packed, ids)
    loss = (expected - exact).norm()
    assert (1e-4 if recipe == "bf16" else 1e-3) * exact.norm() < loss < 0.5 * exact.norm()
    for sizes in ([41], [3, 18, *[1] * 20]):
        cache = packed.empty()
        found = logits_of(model, ids, cache, sizes)
        # Usually the error is below 1 % of the loss. But activations are rounded differently, so that now and then a
        # number gets the next code, or a token another expert.
        assert (found - expected).norm() < 0.3 * loss
        assert cache.get_seq_length() == cache.get_seq_length(max(packed.codecs)) == 41


def test_a_model_without_packed_cache_attends_as_before(hybrid):
    model, stock, _ = hybrid
    ids = tokens(30, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    kvfold.cache(model, "bf16")
    assert model.config._attn_implementation == "kvfold"
    with torch.no_grad():
        found, expected = (
            each(ids, attention_mask=mask, past_key_values=DynamicCache(config=each.config)).logits
            for each in (model, stock)
        )
    assert torch.allclose(found[mask.bool()], expected[mask.bool()], atol=1e-5)
    parts = logits_of(model, ids, DynamicCache(config=model.config), [9, 16, *[1] * 5])
    assert torch.allclose(parts, logits_of(stock, ids, DynamicCache(config=stock.config)), atol=1e-5)


def test_generation_with_left_padding(hybrid):
    """Answers of a padded batch are those of each prompt alone, over transformers' own cache."""
    model, stock, artifact = hybrid
    ids = tokens(21, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    cache = kvfold.cache(model, "bf16", artifact)
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert cache.paged.lengths == [18, 24]
    for row, start in enumerate((6, 0)):
        alone = stock.generate(ids[row : row + 1, start:], **options)
        expected = torch.stack(alone.logits)[:, 0]
        assert (torch.stack(found.logits)[:, row] - expected).norm() < 0.02 * expected.norm()
        assert torch.equal(found.sequences[row, 21:], alone.sequences[0, 21 - start :])


def test_beams_and_copies(hybrid):
    model, _, artifact = hybrid
    first, then = tokens(25, batch=2), tokens(4, batch=2, seed=5)
    cache = kvfold.cache(model, PACKED, artifact)
    alone = [cache.empty() for _ in range(2)]
    logits_of(model, first, cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0, 3, 2, 2]))
    cache.batch_select_indices(torch.tensor([3, 0]))
    found = logits_of(model, then, cache)
    for row, source in enumerate((1, 0)):
        expected = logits_of(model, torch.cat((first[source], then[row]))[None], alone[row])[0, 25:]
        assert (found[row] - expected).norm() < 2e-3 * expected.norm()
    assert cache.unpacked_bytes > 0
    cache.reset()
    assert (cache.get_seq_length(), cache.allocated_bytes) == (0, 0)
    again = logits_of(model, first[:1], cache, [20, 5])
    assert (again - logits_of(model, first[:1], cache.empty())).norm() < 2e-3 * again.norm()


def test_sliding_layers_can_be_cropped_as_in_transformers():
    """Within the window; beyond it only if the past is recorded."""
    model = tiny("Gemma3")
    ids, cache = tokens(30), kvfold.cache(model, "int4:block=5", means(model))
    logits_of(model, ids[:, : WINDOW - 1], cache)
    cache.crop(-3)
    assert cache.get_seq_length() == cache.get_seq_length(2) == WINDOW - 4
    found = logits_of(model, ids[:, WINDOW - 4 :], cache)
    expected = logits_of(model, ids, cache.empty())
    assert (found - expected[:, WINDOW - 4 :]).norm() < 2e-3 * expected.norm()
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    assert cache.get_seq_length() == cache.get_seq_length(2) == 30
    cache.activate_past_recording()
    logits_of(model, tokens(5, seed=8), cache)
    cache.crop(-5)
    then = tokens(3, seed=9)
    found = logits_of(model, then, cache)
    expected = logits_of(model, torch.cat((ids, then), dim=1), cache.empty())
    assert (found - expected[:, 30:]).norm() < 2e-3 * expected.norm()
    logits_of(model, tokens(100, seed=10), cache)
    with pytest.raises(ValueError, match="cannot roll back to 34 tokens"):  # the ring has lost the block
        cache.crop(-99)
    assert cache.get_seq_length() == cache.get_seq_length(2) == 133


def test_states_of_linear_attention_cannot_be_cropped():
    model = tiny("Qwen3Next")
    cache = kvfold.cache(model, "bf16", means(model))
    logits_of(model, tokens(20), cache)
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    assert cache.get_seq_length() == 20
    assert cache.has_previous_state()


@pytest.mark.parametrize("name", ["Gemma3", "FalconH1"])
def test_a_step_that_fails_empties_the_cache(name):
    """Layers before the one that failed have taken the step, and cannot give it back."""
    model = tiny(name)
    cache = kvfold.cache(model, PACKED, means(model))
    ids = tokens(20)
    logits_of(model, ids[:, :15], cache)
    weight = model.model.layers[HYBRIDS[name][1][-1]].self_attn.k_proj.weight
    saved = weight.detach().clone()
    weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        logits_of(model, ids[:, 15:], cache)
    weight.data.copy_(saved)
    assert cache.get_seq_length() == cache.unpacked_bytes == 0
    assert torch.equal(logits_of(model, ids, cache), logits_of(model, ids, cache.empty()))


def test_a_refused_step_that_no_layer_has_taken_leaves_the_cache_as_it_was():
    """The packed layer comes first, and refuses padding among tokens that the cache holds."""
    kinds = ["full_attention", "sliding_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3TextConfig(**sizes, num_hidden_layers=2, head_dim=32, vocab_size=97, layer_types=kinds)
    model = Gemma3ForCausalLM(config).eval()
    cache, ids, hole = kvfold.cache(model, "int4:centre=false"), tokens(20), torch.ones(1, 20, dtype=torch.long)
    logits_of(model, ids[:, :12], cache)
    hole[0, 5] = 0
    with pytest.raises(ValueError, match="left"), torch.no_grad():
        model(ids[:, 12:], attention_mask=hole, past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {12}
    expected = logits_of(model, ids, cache.empty(), [12, 8])[:, 12:]
    assert torch.equal(logits_of(model, ids[:, 12:], cache), expected)


def test_bytes_of_packed_and_of_other_layers():
    """20 tokens of 2 KV heads and 32 coordinates: 2 pages of 4 bits and metadata; 11 tokens of 4 layers in 32 bits."""
    model = tiny("Gemma3")
    cache = kvfold.cache(model, "int4", means(model))
    logits_of(model, tokens(20), cache, [1] * 20)
    assert cache.allocated_bytes == 2 * 2 * 2 * 16 * 2 * (16 + 4)
    assert all(cache.layers[layer].keys is cache.layers[layer].values is None for layer in (2, 5))
    assert cache.unpacked_bytes == 4 * 2 * 2 * WINDOW * 32 * 4  # a view leaves out the oldest token


def test_layers_that_transformers_sees_otherwise_are_refused(monkeypatch):
    model = tiny("Gemma3")
    monkeypatch.setattr("kvfold.engines.transformers.DynamicCache", lambda config: DynamicCache(config=tiny().config))
    with pytest.raises(UnsupportedModel, match=r"caches all tokens in layers 0, 1, .* full attention in layers 2, 5"):
        kvfold.cache(model, "bf16")


def test_transformers_sees_the_layers_of_real_models_as_the_geometry_does():
    """From its own configuration of each model. A cache is refused otherwise."""
    for name, model in MODELS.items():
        if "transformers" in model.engines and not model.refused:
            config = AutoConfig.for_model(**model.config)
            layers = DynamicCache(config=config).layers
            grow = [number for number, layer in enumerate(layers) if type(layer) in GROWING]
            assert grow == list(model.packed) == list(Geometry.from_config(config.to_dict()).packed), name
