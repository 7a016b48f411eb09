"""transformers: `model.generate(..., past_key_values=kvfold.cache(model, "saw-int4"))`.

The `update` of a packed layer hands the new keys and values on as they are, marked `Incoming`. The attention function
registered here recognises them, packs them into pages and attends over the pages. Other layers have transformers' own
cache, and attend as with transformers.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvfold.artifact import Artifact, Fingerprint
from kvfold.calibration.automatic import calibrate_automatically
from kvfold.fitted import Fitted
from kvfold.format.codec import Codec, sixteen_bit
from kvfold.geometry import Geometry, UnsupportedModel, listed
from kvfold.models import load_tokenizer
from kvfold.ops.dispatch import check_dtype, choose
from kvfold.ops.pages import Logits
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.unpacked_attention import attend_masked, attend_unpacked, logits_of

IMPLEMENTATION = "kvfold"
GROWING = (DynamicLayer, LinearAttentionAndFullAttentionLayer)  # what transformers caches all tokens in

_calibrated: WeakKeyDictionary[PreTrainedModel, dict[str, Artifact]] = WeakKeyDictionary()


def cache(
    model: PreTrainedModel, recipe: str | Recipe, artifact: Artifact | None = None, page_size: int | None = None
) -> "PackedCache":
    """An empty cache for `model.generate(past_key_values=...)` or plain forward calls, for one batch of sequences.

    The model's attention implementation is set to kvfold's. With any other cache, it attends as transformers does.
    Means and fits come from `artifact`. Without one, a recipe that needs them is calibrated on a short text, once per
    model and recipe. Pages have `page_size` tokens, by default the recipe's number.
    """
    recipe = parse(recipe) if isinstance(recipe, str) else recipe
    geometry = Geometry.from_config(model.config.to_dict())
    if artifact is not None:
        if artifact.metadata.shard is not None:
            raise ValueError(
                "the artifact holds the KV heads of one rank, and the model is not split: pass the whole one"
            )
        artifact.metadata.model.check(model)
    pages = Fitted.of(recipe, geometry, artifact).page_layouts().values()  # refuses a model that it does not fit
    if page_size not in (None, recipe.page_size) and any(page.per_page for page in pages):
        raise ValueError(f"{recipe} quantizes pages of {recipe.page_size} tokens as a whole, so page_size is given")
    ratio = geometry.q_heads // geometry.kv_heads
    capped = geometry.shape.cap is not None
    check_dtype([choose(layout, ratio, model.device, cap=capped) for layout in set(pages)], model.dtype)
    if model.config._attn_implementation != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModel(f"{geometry.architecture} does not let its attention be replaced")
    if artifact is None and (recipe.centre or recipe.learns):
        artifact = _calibrate_once(model, recipe)
    raw_dtype = sixteen_bit(model.dtype)
    codecs = Fitted.of(recipe, geometry, artifact).codecs(raw_dtype, model.device)
    return PackedCache(recipe, model.config, codecs, raw_dtype, model.device, page_size or recipe.page_size)


def _calibrate_once(model: PreTrainedModel, recipe: Recipe) -> Artifact:
    known, name = _calibrated.setdefault(model, {}), recipe.fitted_as if recipe.learns else ""
    if name not in known or known[name].metadata.model != Fingerprint.of(model):  # its weights may have changed
        try:
            tokenizer = load_tokenizer(model.config._name_or_path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{recipe} needs calibration, and the model's tokenizer was not found for it: pass artifact=kvfold."
                "calibrate(model, tokens, recipes=[recipe])" + ("" if recipe.learns else ", or use centre=false")
            ) from error
        known[name] = calibrate_automatically(model, tokenizer, [recipe])
    return known[name]


@dataclass(frozen=True)
class Incoming:
    """New keys or values [sequences, kv_heads, n, d] of a layer, on their way into a PackedCache.

    Layers that share this layer's cache get them too.
    """

    cache: "PackedCache"
    layer: int
    states: Tensor

    def to(self, device: torch.device) -> "Incoming":
        """What models do before they hand keys and values on to a layer that shares them."""
        assert device == self.states.device, "a packed cache is on one device"
        return self


class PackedLayer(CacheLayerMixin):
    """A packed layer as transformers sees it. It has sizes only: the bytes are in the pages, which the cache owns."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: "PackedCache", number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("pages are allocated as tokens arrive")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        return Incoming(self.cache, self.number, key_states), Incoming(self.cache, self.number, value_states)

    def get_seq_length(self) -> int:
        return self.cache.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """The cache crops and reorders the pages of all layers at once."""

    def reorder_cache(self, beam_idx: Tensor) -> None: ...


class PackedMixedLayer(LinearAttentionLayer, PackedLayer):
    """A packed layer that has Mamba beside its attention. Mamba's states are transformers' own."""

    is_compileable = False

    def __init__(self, cache: "PackedCache", number: int, states: int) -> None:
        PackedLayer.__init__(self, cache, number)
        LinearAttentionLayer.__init__(self, states)


class PackedCache(Cache):
    """A transformers cache over packed pages. Left padding is not stored: sequences have their own lengths.

    Layers that are not packed have the cache that transformers gives them.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: PreTrainedConfig,
        codecs: dict[int, tuple[Codec, Codec]],  # keys and values, per packed layer
        raw_dtype: torch.dtype,
        device: torch.device,
        page_size: int,
    ) -> None:
        self.recipe, self.config, self.codecs = recipe, config, codecs
        self.raw_dtype, self.device, self.page_size = raw_dtype, device, page_size
        self.geometry = Geometry.from_config(config.to_dict())
        super().__init__(layers=[])
        self.reset()

    def _new_layers(self) -> list[Any]:
        layers: list[Any] = DynamicCache(config=self.config).layers
        grow = tuple(n for n, layer in enumerate(layers) if type(layer) in GROWING)
        if grow != self.geometry.packed:
            raise UnsupportedModel(
                f"{self.geometry.architecture}: transformers caches all tokens in layers {listed(grow)}, and the "
                f"configuration has full attention in layers {listed(self.geometry.packed)}"
            )
        for n in grow:
            mixed = isinstance(layers[n], LinearAttentionLayer)
            layers[n] = PackedMixedLayer(self, n, layers[n].number_of_states) if mixed else PackedLayer(self, n)
        return layers

    def empty(self) -> "PackedCache":
        """Another cache like this one, without sequences."""
        return PackedCache(self.recipe, self.config, self.codecs, self.raw_dtype, self.device, self.page_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedCache":
        copied = memo[id(self)] = object.__new__(PackedCache)
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a packed cache cannot be pickled: keep its tokens, and let the model read them again")

    def reset(self) -> None:
        """Forget every sequence, and free their pages."""
        self.layers = self._new_layers()
        self.paged: PagedCache | None = None
        self.tokens = 0  # columns of the batch so far, padding included
        self.thread = 0  # whose forward call is between the first and the last packed layer; 0: none, -1: of several

    @property
    def is_initialized(self) -> bool:
        return self.paged is not None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pages and rings of all packed layers."""
        return 0 if self.paged is None else self.paged.allocated_bytes

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of what transformers caches: layers that are not packed, and the states of Mamba beside attention."""
        held = []
        for layer in self.layers:
            held += [getattr(layer, "keys", None), getattr(layer, "values", None)]
            held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)

    @torch.no_grad()
    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, logits: Logits, again: bool = False
    ) -> Tensor:
        """Pack a layer's new tokens and attend its queries: [sequences, heads, n, d] -> [sequences, n, heads, d].

        `again`: the queries are those of another layer, which reads the tokens that this one has packed.
        """
        n, padding, number = q.shape[2], mask, self.geometry.packed.index(layer)
        self._enter()
        begins = number == 0 and not again
        earlier = self.tokens if begins else self.tokens - n
        out = q.new_empty(q.shape[0], n, q.shape[1], v.shape[-1])
        try:
            if mask is not None and mask.ndim == 4:
                self._check(mask, earlier)
                padding = mask.any(dim=2).squeeze(1)
            if begins:
                self._begin(q.shape[0], n, padding)
            assert self.paged is not None
            queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
            if again:
                self.paged.read(number, queries, logits, out)
            else:
                self.paged.attend(number, queries, keys, values, logits, out)
            if mask is not None and mask is not padding:
                codecs, block = self.codecs[layer], self.recipe.block
                out = attend_masked(q, k, v, mask, logits, codecs, block, self.raw_dtype).to(q.dtype)
        except Exception:
            # A step that fails leaves no tokens behind. Layers that are not packed cannot take it back: if one may have
            # its tokens, all tokens go with it.
            others = [place for place, own in enumerate(self.layers) if type(own) is not PackedLayer]
            if not others and earlier:
                self.crop(earlier - self.tokens)
            elif not earlier or self.tokens > earlier or others[0] <= layer:
                self.reset()
            self._leave()
            raise
        if number == len(self.codecs) - 1:
            self._leave()
        return out

    def _enter(self) -> None:
        """Refuse a thread while the forward call of another runs. After that, both are refused until `reset`: layers
        that are not packed may hold tokens of both."""
        if self.thread not in (0, get_ident()):
            self.thread = -1
            raise ValueError("two threads used this cache at once: make one for each thread, or reset() it")
        self.thread = get_ident()

    def _leave(self) -> None:
        if self.thread == get_ident():
            self.thread = 0

    def _check(self, mask: Tensor, earlier: int) -> None:
        """Refuse a mask of four dimensions that `attend_masked` does not take, after `earlier` tokens."""
        if mask.dtype != torch.bool or earlier:
            raise ValueError(
                "a packed cache takes a mask of four dimensions only if it is boolean, and only in the first step: "
                "pass attention_mask [batch, tokens], and images at the beginning of the prompt"
            )
        if any(codec.layout.per_page for codecs in self.codecs.values() for codec in codecs):
            raise ValueError(
                f"{self.recipe} quantizes whole pages, which tokens of an image cannot read: use another recipe"
            )

    def _begin(self, sequences: int, n: int, mask: Tensor | None) -> None:
        """Make room for a step of n tokens per sequence."""
        if self.paged is None:
            self.paged = PagedCache(
                list(self.codecs.values()),
                self.geometry.kv_heads,
                sequences,
                ratio=self.geometry.q_heads // self.geometry.kv_heads,
                capped=self.geometry.shape.cap is not None,
                block=self.recipe.block,
                page_size=self.page_size,
                raw_dtype=self.raw_dtype,
                device=self.device,
                shared=[n for n, layer in enumerate(self.geometry.packed) if layer in self.geometry.targets],
            )
        if sequences != len(self.paged.lengths):
            raise ValueError(f"the cache holds {len(self.paged.lengths)} sequences, the call brings {sequences}")
        counts = [n] * sequences if mask is None else _left_padded(mask, n, self.paged.lengths)
        self.paged.extend(counts)
        self.tokens += n

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence (transformers passes a negative number).

        A layer that is not packed may refuse. See `activate_past_recording`.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the negative number of tokens to remove")
        if self.paged is not None:
            removed = min(-tokens_to_remove, self.tokens)
            counts = [min(removed, length) for length in self.paged.lengths]
            self.paged.check_crop(counts)
            super().crop(-removed)
            self.paged.crop(counts)
            self.tokens -= removed

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.paged is not None:
            self.paged.select(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.paged is not None:
            self.reorder_cache(torch.arange(len(self.paged.lengths)).repeat_interleave(repeats))


def _left_padded(mask: Tensor, n: int, lengths: list[int]) -> list[int]:
    """New tokens per row of a mask [sequences, columns so far], whose last n columns are new. The mask may only hide
    padding before the first token of a row."""
    seen = mask.bool().cpu()
    if (
        not torch.equal(seen, seen.cummax(dim=1).values)
        or (seen.sum(dim=1) - seen[:, -n:].sum(dim=1)).tolist() != lengths
    ):
        raise ValueError("attention_mask hides tokens that are not left padding: pad on the left (padding_side='left')")
    return seen[:, -n:].sum(dim=1).tolist()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of models with a PackedCache."""
    if not isinstance(key, Incoming):
        n, tokens = query.shape[2], key.shape[2]
        if attention_mask is None and 1 < n < tokens and getattr(module, "is_causal", True):
            attention_mask = torch.ones(query.shape[0], tokens, dtype=torch.bool, device=query.device)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = _causal_mask(attention_mask, n)
        return attend_unpacked(module, query, key, value, attention_mask, scaling=scaling, **kwargs), None
    for unsupported in ("sliding_window", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__}: attention with {unsupported} cannot run over packed pages"
            )
    logits = logits_of(query, scaling, kwargs)
    again = bool(module.layer_idx != key.layer)
    return key.cache.attend(key.layer, query, key.states, value.states, attention_mask, logits, again), None


def _mask(mask_function: Callable = causal_mask_function, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """A plain causal mask stays [batch, tokens], or is None without padding. Any other mask is built as for SDPA."""
    if mask_function is not causal_mask_function:
        return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    return None if attention_mask is None or attention_mask.all() else attention_mask


def _causal_mask(padding: Tensor, n: int) -> Tensor:
    """bool[batch, 1, n, tokens] for the last n of the tokens in `padding` [batch, tokens]."""
    tokens = torch.arange(padding.shape[1], device=padding.device)
    return padding.bool()[:, None, None] & (tokens <= tokens[-n:, None])


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
