"""PagedCache against an independent model: the raw keys and values of every token, and float64 attention over what the
definition says a query at position t reads."""

import functools
import itertools
import math
import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from decoded_slots import decoded_by_hand
from page_views import key_views, value_views
from random_layers import random_layer
from rounded_rotations import as_multiplied

from kvfold.fitted import Fitted
from kvfold.format.codec import Codec
from kvfold.format.layout import affine_slot, channel_slot, raw_slot
from kvfold.geometry import Geometry
from kvfold.ops import naive
from kvfold.ops.attend import attend_torch
from kvfold.ops.pages import Logits
from kvfold.paged import PagedCache
from kvfold.recipe import Recipe
from kvfold.recipes import parse
from kvfold.transforms import Matrix

ROLLBACK = 64  # what the documentation promises
LAYERS = 2


pytestmark = pytest.mark.usefixtures("_poisoned_memory")


def test_fresh_memory_is_poisoned():
    cache = make_cache(Setup())
    cache.extend([40])
    assert all((pool == 0xFF).all() and len(pool) for pool in cache.pools)
    assert all(ring.isnan().all() and len(ring) for ring in cache.rings)


@dataclass(frozen=True)
class Setup:
    recipe: str = "saw-int4:block=7"
    page_size: int = 4
    kv_heads: int = 2
    ratio: int = 3  # query heads of a KV head
    dims: int = 16
    centred: bool = True
    dtype: torch.dtype = torch.float32
    raw_dtype: torch.dtype = torch.bfloat16
    value_bits: int | None = None  # where values are stored in another width than keys
    value_by_channel: bool = False  # where values are quantized over whole pages, as keys may be
    sinks: bool = False  # learned ones
    cap: float | None = None  # of logits
    value_dims: int | None = None  # where they differ from those of keys
    shared: bool = False  # other layers read the pages too

    @property
    def parsed(self) -> Recipe:
        return parse(self.recipe)

    @property
    def block(self) -> int:
        """Tokens of the open block: whole pages, if these are quantized as a whole."""
        own = self.parsed.block
        return math.lcm(own or self.page_size, self.page_size) if self.by_page else own

    @property
    def logits(self) -> Logits:
        learned = 4 * torch.randn(self.kv_heads * self.ratio, generator=torch.Generator().manual_seed(7))
        return Logits(self.dims**-0.5, self.cap, learned if self.sinks else None)

    def means(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        if not self.centred:
            return None, None
        generator = torch.Generator().manual_seed(100 + layer)
        mean = torch.randn(2, self.kv_heads, 256, generator=generator)
        return 4 * mean[0, :, : self.dims], mean[1, :, : self.both[1]]

    def first(self, layer: int) -> torch.Tensor:
        """What keys at position 0 are near."""
        noise = torch.randn(self.kv_heads, 256, generator=torch.Generator().manual_seed(200 + layer))
        return 8 * noise[:, : self.dims]

    @property
    def both(self) -> tuple[int, int]:
        """Dims of keys and of values."""
        return self.dims, self.value_dims or self.dims

    @property
    def by_page(self) -> bool:
        """Whether whole pages are quantized."""
        return self.value_by_channel or self.parsed.name.startswith(("kivi", "kitty"))

    def fit(self, layer: int) -> dict[str, torch.Tensor]:
        """Of random statistics, around the means."""
        recipe, (key_mean, value_mean) = self.parsed, self.means(layer)
        statistics = random_layer(self.dims, self.kv_heads, seed=layer)
        means = (None, None) if key_mean is None or not recipe.centre else (key_mean.double(), value_mean.double())
        fit = recipe.fit(statistics.statistics, statistics.rope, means)
        if key_mean is None:
            return dict(fit)
        return {"key_mean": key_mean, "value_mean": value_mean, "key_first": self.first(layer), **fit}

    def codecs(self) -> list[tuple[Codec, Codec]]:
        if self.value_dims is not None:
            sides = [replace(self, dims=dims, value_dims=None).codecs() for dims in self.both]
            return [(key, value) for (key, _), (_, value) in zip(*sides, strict=True)]
        geometry = Geometry.uniform("any", LAYERS, self.kv_heads, self.kv_heads, self.dims)
        fits = {layer: self.fit(layer) for layer in range(LAYERS)}
        result = []
        for key, value in Fitted(self.parsed, geometry, fits).codecs(self.raw_dtype, "cpu").values():
            if self.value_by_channel:
                value = Codec(channel_slot(self.dims, 4), value.transform, self.raw_dtype)
            elif self.value_bits is not None:
                layout = raw_slot(self.dims) if self.value_bits == 16 else affine_slot(self.dims, self.value_bits)
                value = Codec(layout, value.transform, self.raw_dtype)
            result.append((key, value))
        return result


def make_cache(setup: Setup, sequences: int = 1, *, shuffled: int | None = None, pages: int = 40) -> PagedCache:
    """An empty cache; `shuffled`: one whose free pages come in random order, as after long service."""
    cache = PagedCache(
        setup.codecs(),
        setup.kv_heads,
        sequences,
        ratio=setup.ratio,
        capped=setup.cap is not None,
        block=setup.parsed.block,
        page_size=setup.page_size,
        raw_dtype=setup.raw_dtype,
        shared=range(LAYERS) if setup.shared else (),
    )
    if shuffled is not None:
        rng = random.Random(shuffled)
        cache.tables.references = [0] * pages
        cache.tables.free = rng.sample(range(pages), pages)
    return cache


# --- the model


def hadamard(dims: int, order: int) -> np.ndarray:
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    return np.kron(np.eye(dims // order), np.array(signs))


def by_channel(y: np.ndarray, bits: int, boosted: int) -> np.ndarray:
    """Full pages float64[pages, tokens, kv_heads, d] of 16-bit numbers, through the integers of each channel."""
    y = y.astype(np.float32)
    levels_ = np.full(y.shape[:1] + y.shape[2:], 2**bits - 1)
    strength = np.abs(y).astype(np.float64).sum(axis=1)
    order = np.argsort(-strength, axis=-1, kind="stable")[..., :boosted]  # ties go to the lowest channel
    np.put_along_axis(levels_, order, 4**bits - 1, axis=-1)
    low, high = y.min(axis=1), y.max(axis=1)
    scale, offset = (x.astype(np.float16).astype(np.float32) for x in ((high - low) / levels_.astype(np.float32), low))
    codes = np.rint((y - offset[:, None]) / np.maximum(scale, np.float32(2**-24))[:, None])
    codes = np.clip(codes, 0, levels_[:, None]).astype(np.float64)
    return codes * scale[:, None] + offset[:, None]


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer, by their definition."""

    codec: Codec
    mean: np.ndarray  # [kv_heads, d]
    matrix: np.ndarray  # [kv_heads or 1, d, d]; of a Hadamard rotation, its signs
    inverse: np.ndarray
    order: int
    first: np.ndarray | None  # [kv_heads, d]

    def stored(self, x: torch.Tensor) -> np.ndarray:
        """Tokens [n, kv_heads, d] -> float64[n, 3, kv_heads, d]: as queries read them in 16 bits, packed, and packed at
        position 0; NaN where that depends on the page."""
        centred = x.float().numpy() - self.mean.astype(np.float32)
        y = (by_head(centred.astype(np.float64), self.matrix) * self.order**-0.5).astype(np.float32)
        wide = torch.from_numpy(y).to(self.codec.raw_dtype).double().numpy()
        if self.codec.layout.segments[0].rule == "raw":
            return np.stack((wide, wide, wide), axis=1)
        if self.codec.layout.per_page:
            return np.stack((wide, *[np.full_like(wide, np.nan)] * 2), axis=1)
        packed = self.decoded(self.codec.encode(x))
        if self.first is None:
            return np.stack((wide, packed, packed), axis=1)
        near = (by_head((self.first - self.mean)[None], self.matrix) * self.order**-0.5).astype(np.float32)
        parts = self.codec.quantize(torch.from_numpy(y - near).unsqueeze(-2))
        slots = torch.cat([part.view(torch.uint8) for part in parts], dim=-1).squeeze(-2)
        return np.stack((wide, packed, self.decoded(slots) + near), axis=1)

    def decoded(self, slots: torch.Tensor) -> np.ndarray:
        return decoded_by_hand(slots, self.codec.layout, self.codec.raw_dtype, self.codec.centroids)

    def packed(self, stored: np.ndarray, page_size: int) -> np.ndarray:
        """All tokens of a sequence [tokens, 3, kv_heads, d] -> their packed form; NaN in a page that is not full and is
        quantized as a whole."""
        if not self.codec.layout.per_page:
            return np.concatenate((stored[:1, 2], stored[1:, 1]))
        (segment,), packed = self.codec.layout.segments, stored[:, 1].copy()
        full = len(stored) // page_size * page_size
        for start in range(0, full, page_size):
            page = slice(start, start + page_size)
            packed[page] = by_channel(stored[None, page, 0], segment.bits, segment.boosted)[0]
        return packed

    def dual(self, q: np.ndarray) -> np.ndarray:
        """[..., kv_heads, ratio, d]"""
        return np.einsum("...hgd,hed->...hge", q, self._each(self.inverse)) * self.order**-0.5

    def back(self, y: np.ndarray) -> np.ndarray:
        return np.einsum("...hgd,hde->...hge", y, self._each(self.inverse)) * self.order**-0.5

    def _each(self, matrix: np.ndarray) -> np.ndarray:
        return np.broadcast_to(matrix, (len(self.mean), *matrix.shape[1:]))


def by_head(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    return np.einsum("...hd,hde->...he", x, np.broadcast_to(matrix, (x.shape[-2], *matrix.shape[1:])))


@functools.cache
def sides(setup: Setup, layer: int) -> tuple[Side, Side]:
    recipe, result = setup.parsed, []
    raw = layer in recipe.skip or recipe.name == "bf16"
    rotated = ("quarot-int2", "saw-int4", "kmeans-saw-int4")
    for which, (codec, dims) in enumerate(zip(setup.codecs()[layer], setup.both, strict=True)):
        rotates = not raw and recipe.name in rotated and (not which or recipe.values)
        order = (recipe.order or dims & -dims) if rotates else 1
        mean = setup.means(layer)[which] if setup.centred and recipe.centre and not raw else None
        zero = np.zeros((setup.kv_heads, dims))
        mean64 = zero if mean is None else mean.double().numpy()
        matrix = inverse = hadamard(dims, order)[None]
        rotation = codec.transform.rotation
        if isinstance(rotation, Matrix):  # tests/methods build them from their definitions
            matrix = as_multiplied(rotation.matrix.double().numpy())
            inverse = np.linalg.inv(matrix)
        has_first = which == 0 and mean is not None and not codec.layout.per_page
        first = setup.first(layer).double().numpy() if has_first else None
        result.append(Side(codec, mean64, matrix, inverse, order, first))
    return result[0], result[1]


@dataclass(frozen=True)
class Token:
    """Keys and values are filled up to the same d."""

    raw: torch.Tensor  # [layers, 2, kv_heads, d]: what was fed
    stored: np.ndarray  # float64[layers, 2 (K, V), 3 (16 bits, packed, packed at position 0), kv_heads, d]


def attention(setup: Setup, layer: int, tokens: Sequence[Token], q: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What the last n tokens of a sequence must get for queries q [n, q_heads, d], and how far float32 may be off."""
    keys, values = sides(setup, layer)
    stored = np.stack([token.stored[layer] for token in tokens])  # [tokens, 2 (K, V), 3, …]
    k, v = (
        np.stack((own[:, 0], np.nan_to_num(side.packed(own, setup.page_size))))
        for i, (side, dims) in enumerate(zip((keys, values), setup.both, strict=True))
        for own in [stored[:, i, ..., :dims]]
    )  # [2, tokens, kv_heads, d]
    j, t = np.arange(len(tokens)), np.arange(len(tokens) - len(q), len(tokens))[:, None]
    wide = (j >= t // setup.block * setup.block) if setup.block else (j > t)  # [n, tokens]
    grouped = q.double().numpy().reshape(len(q), setup.kv_heads, setup.ratio, setup.dims)
    queries = keys.dual(grouped) * setup.logits.scale
    logits = np.where(wide[:, None, None], *(np.einsum("nhgd,jhd->nhgj", queries, form) for form in k))
    logits += setup.logits.scale * np.einsum("nhgd,hd->nhg", grouped, keys.mean)[..., None]
    if setup.cap is not None:
        logits = setup.cap * np.tanh(logits / setup.cap)
    logits = np.where((j <= t)[:, None, None], logits, -np.inf)
    learned = np.full(logits.shape[:-1], -np.inf)
    if setup.logits.sinks is not None:
        learned[:] = setup.logits.sinks.double().numpy().reshape(setup.kv_heads, setup.ratio)
    highest = np.maximum(logits.max(-1), learned)[..., None]
    weights = np.exp(logits - highest)
    weights /= weights.sum(-1, keepdims=True) + np.exp(learned[..., None] - highest)
    mixed = sum(
        np.einsum("nhgj,jhd->nhgd", weights * mask[:, None, None], form)
        for mask, form in zip((wide, ~wide), v, strict=True)
    )
    out = values.back(mixed) + weights.sum(-1, keepdims=True) * values.mean[:, None]
    # a logit is a sum of products s·c·q and o·q, whose rounding errors are as large as the largest of them allow
    terms = np.abs(queries).sum(-1).max() * 2 * np.abs(k).max()
    size = np.abs(v).max() * setup.both[1] ** 0.5 + np.abs(values.mean).max()
    return out.reshape(*q.shape[:-1], -1), (16 * 2**-24 * (4 + terms)) * size


class World:
    """A cache and its model, fed with the same tokens. Every step is checked."""

    def __init__(self, setup: Setup, sequences: int, seed: int) -> None:
        self.setup, self.generator = setup, torch.Generator().manual_seed(seed)
        self.logits = setup.logits  # one for all steps, as a layer of a model has
        self.cache = make_cache(setup, sequences, shuffled=seed)
        self.cache.extend([0] * sequences)
        self.garbage = (-1, 0x7FFF, -0x5A5B)[seed % 3]  # NaN, or a number, which no centroid has
        self.rows: list[list[Token]] = [[] for _ in range(sequences)]
        self.starts = [0] * sequences  # lengths before the last step
        self.tops = [0] * sequences  # the most tokens that a sequence ever had

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def tokens(self, count: int) -> list[Token]:
        setup = self.setup
        raw = (2 * self.randn(count, LAYERS, 2, setup.kv_heads, max(setup.both))).to(setup.dtype)
        stored = np.zeros((count, LAYERS, 2, 3, setup.kv_heads, max(setup.both)))
        for layer, which in itertools.product(range(LAYERS), range(2)):
            mean, dims = setup.means(layer)[which], setup.both[which]
            if mean is not None:
                raw[:, layer, which, :, :dims] += mean.to(setup.dtype)
            stored[:, layer, which, ..., :dims] = sides(setup, layer)[which].stored(raw[:, layer, which, :, :dims])
        return [Token(*token) for token in zip(raw, stored, strict=True)]

    def batch(self, new: list[list[Token]], columns: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """q [layers, sequences, columns, q_heads, d], and k and v [sequences, columns, kv_heads, d] per layer,
        left-padded: queries with anything, keys and values with NaN."""
        setup = self.setup
        heads = setup.kv_heads * setup.ratio
        q = self.randn(LAYERS, len(new), columns, heads, setup.dims).to(setup.dtype)
        kv = torch.full((LAYERS, 2, len(new), columns, setup.kv_heads, max(setup.both)), torch.nan, dtype=setup.dtype)
        for row, tokens in enumerate(new):
            for column, token in enumerate(tokens, start=columns - len(tokens)):
                kv[:, :, row, column] = token.raw
        return q, [[side[..., :dims] for side, dims in zip(layer, setup.both, strict=True)] for layer in kv]

    def step(self, counts: Sequence[int]) -> None:
        """Feed random tokens. `naive` is compared, too, where it is not slow, and where it quantizes whole pages."""
        new = [self.tokens(count) for count in counts]
        columns = max(counts)
        q, kv = self.batch(new, columns)
        self.starts = [len(tokens) for tokens in self.rows]
        self.cache.extend(counts)
        for tokens, more in zip(self.rows, new, strict=True):
            tokens.extend(more)
        lengths = [len(tokens) for tokens in self.rows]
        self.tops = list(map(max, self.tops, lengths))
        assert self.cache.lengths == lengths
        for layer in range(LAYERS):
            ring = self.cache.rings[layer].clone()
            out = self.cache.attend(layer, q[layer], *kv[layer], self.logits)
            assert out.dtype == torch.float32
            assert out.shape == (*q.shape[1:-1], self.setup.both[1])
            assert all((padded[: columns - count] == 0).all() for padded, count in zip(out, counts, strict=True))
            outputs = [flat(out, counts)]
            if columns <= 2 or (self.setup.by_page and layer == (0 in self.setup.parsed.skip)):  # the first packed one
                pages = self.cache.pages(layer)
                pages.ring.copy_(ring)  # as before the step
                new = naive.store(pages, *(flat(x, counts) for x in kv[layer]))
                outputs.append(naive.attend(pages, flat(q[layer], counts), new, self.logits))
            self.check(layer, q[layer], counts, outputs)
            if self.setup.shared:
                others = self.randn(*q[layer].shape).to(q.dtype)
                self.check(layer, others, counts, [flat(self.cache.read(layer, others, self.logits), counts)])

    def check(self, layer: int, q: torch.Tensor, counts: Sequence[int], outputs: list[torch.Tensor]) -> None:
        for row, count in enumerate(counts):
            if count:
                expected, tolerance = attention(self.setup, layer, self.rows[row], q[row, -count:])
                for got in outputs:
                    error = np.abs(got.split(list(counts))[row].double().numpy() - expected).max()
                    assert error <= tolerance, (layer, row, error, tolerance)

    def failing_step(self, counts: Sequence[int], layer: int) -> None:
        """A NaN arrives in the last token of the last row that has one; the engine takes the step back."""
        self.starts = [len(tokens) for tokens in self.rows]
        q, kv = self.batch([self.tokens(count) for count in counts], max(counts))
        row = max(row for row, count in enumerate(counts) if count)
        kv[layer][self.starts[row] % 2][row, -1, -1, -1] = torch.nan
        self.cache.extend(counts)
        self.tops = list(map(max, self.tops, self.cache.lengths))
        for before in range(layer):
            self.cache.attend(before, q[before], *kv[before], self.logits)
        with pytest.raises(ValueError, match="NaN"):
            self.cache.attend(layer, q[layer], *kv[layer], self.logits)
        self.cache.crop(counts)
        assert self.cache.lengths == self.starts
        self.poison()  # whatever the step has written

    def crop(self, counts: Sequence[int]) -> bool:
        """Roll back; false where that is refused, which it may be beyond what is promised."""
        lengths = [len(tokens) - count for tokens, count in zip(self.rows, counts, strict=True)]
        promised = not self.setup.block or all(
            length >= top - ROLLBACK or length % self.setup.block == 0
            for length, top in zip(lengths, self.tops, strict=True)
        )
        before, refusal = self.snapshot(), None
        try:
            self.cache.crop(counts)
        except ValueError as error:
            refusal = str(error)
        if refusal is not None:
            assert "cannot roll back to" in refusal
            assert not promised
            assert self.snapshot() == before
            return False
        self.rows = [tokens[:length] for tokens, length in zip(self.rows, lengths, strict=True)]
        assert self.cache.lengths == lengths
        self.poison()
        return True

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        self.starts, self.tops = [self.starts[row] for row in rows], [self.tops[row] for row in rows]
        self.poison()

    def snapshot(self) -> tuple:
        tables = self.cache.tables
        memory = [tensor.view(torch.uint8).numpy().tobytes() for tensor in (*self.cache.pools, *self.cache.rings)]
        return repr((tables.pages, tables.lengths, tables.references, tables.free, self.cache.kept_from)), memory

    def poison(self) -> None:
        """Overwrite every slot that holds no token of a living sequence, and in rings all
        but open blocks and what may be taken back."""
        cache, size = self.cache, self.setup.page_size
        live = torch.zeros(cache.tables.capacity, size, dtype=torch.bool)
        for pages, length in zip(cache.tables.pages, cache.lengths, strict=True):
            for token in range(length):
                live[pages[token // size], token % size] = True
        for layout, pool, ring in zip(cache.layouts, cache.pools, cache.rings, strict=True):
            dead = ~torch.cat((live, live.new_zeros(len(pool) - len(live), size)))[:, None].expand(
                -1, pool.shape[1], -1
            )
            unfilled = dead.any(dim=2, keepdim=True)
            for slot, (codes, meta) in (
                (layout.key, key_views(layout, pool)),
                (layout.value, value_views(layout, pool)),
            ):
                of_codes, of_meta = (unfilled.expand_as(dead), unfilled) if slot.per_page else (dead, dead)
                codes[of_codes] = 0xFF
                meta.view(torch.int16)[of_meta] = self.garbage
            for row, length in enumerate(cache.lengths if len(ring) else ()):
                first = min(self.tops[row] - cache.ring_tokens, length // self.setup.block * self.setup.block)
                places = {token % cache.ring_tokens for token in range(max(0, first), length)}
                for side in layout.ring_sides(ring):
                    side[row, :, sorted(set(range(cache.ring_tokens)) - places)] = torch.nan


def flat(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """A left-padded batch [sequences, n, …] as ops see it: [tokens, …], one sequence after the other."""
    return torch.cat([row[len(row) - count :] for row, count in zip(x, counts, strict=True)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- random histories

RECIPES = [
    "int4",
    "int2:group=8",
    "int8:centre=false",
    "saw-int4:values=true",
    "saw-int4:order=4,skip=0",
    "quarot-int2:group=8,skip=1",
    "saw-int4:values=true,order=8,group=4",
    "kmeans-saw-int4:centroids=5",
    "oscar-int2:per_head=true,group=8",
    "gtq-k3v2",
    "kivi-2:group=8",
    "kitty-2:boost=0.5",
    "hessian-int4:group=8",
]
BLOCKS = [0, 1, 4, 7, 16, 30]
PAGE_SIZES = [1, 3, 16, 64]
HEADS = [(1, 4), (2, 3), (3, 1), (2, 4)]  # KV heads, query heads of each


BY_PAGE = [
    Setup("kivi-2:group=8,block=0", 4),
    Setup("kivi-2:group=8,block=7", 4, dtype=torch.bfloat16),
    Setup("kivi-4:group=8,skip=0,block=40", 16, raw_dtype=torch.float16, dtype=torch.float16),
    Setup("kivi-2:group=16,block=1", 3, kv_heads=1, ratio=4),
    Setup("kivi-2:group=8,block=6", 64),
    Setup("kitty-2:block=0,boost=0.5", 4),
    Setup("kitty-2:block=7,boost=0.5,skip=1", 5, centred=False),
    Setup("kitty-2:block=24,boost=0.25", 8, dims=32),
    Setup("int4:block=3", 4, value_by_channel=True),
    Setup("kivi-4:group=8,block=3", 4, value_by_channel=True),  # keys and values go together
]


def setups() -> list[Setup]:
    """Each block with each page size, the rest dealt out among them; then other head dimensions and types."""
    dealt = itertools.cycle(RECIPES), itertools.cycle(HEADS)
    result = []
    for block, page_size in itertools.product(BLOCKS, PAGE_SIZES):
        recipe, (kv_heads, ratio) = map(next, dealt)
        joined = f"{recipe}{',' if ':' in recipe else ':'}block={block}"
        result.append(Setup(joined, page_size, kv_heads, ratio))
    result += [
        Setup("bf16", 3),
        Setup("bf16", 16, raw_dtype=torch.float16, dtype=torch.float16),
        Setup("saw-int4:block=6", 4, dims=80, dtype=torch.bfloat16),
        Setup("saw-int4:values=true,block=6", 16, dims=64, dtype=torch.float16, raw_dtype=torch.float16),
        Setup("int4:block=6", 16, dims=128, centred=False),
        Setup("quarot-int2:block=3", 2, dims=96),
        Setup("saw-int4:values=true,block=7", 4, value_bits=2),
        Setup("int2:block=7", 3, value_bits=8),
        Setup("saw-int4:block=7", 4, value_bits=16),
        Setup("bf16", 4, value_bits=4),
        Setup("hessian-int4:block=7", 4),
        Setup("tq-k5v1:skip=0,block=7", 4),
        Setup("gtq-k3v3:widths=all,per_head=true,block=7", 4, dims=32),
        Setup("kmeans-int4:centroids=9,block=3", 4, value_bits=2),
        Setup("saw-int4:values=true,block=7", 4, sinks=True),
        Setup("int4", 3, sinks=True, dtype=torch.bfloat16),
        Setup("oscar-int2:per_head=true,group=8,block=2", 16, centred=False, sinks=True),
        Setup("kivi-2:group=8,block=7", 4, sinks=True),
        Setup("saw-int4:values=true,block=7", 4, cap=5.0),
        Setup("int8", 3, cap=0.5, sinks=True),
        Setup("saw-int4:values=true,block=7", 4, dims=24, value_dims=16, sinks=True),
        Setup("oscar-int2:block=5", 3, dims=16, value_dims=48, cap=9.0),
        Setup("kivi-2:group=8,block=7", 4, dims=32, value_dims=16, value_by_channel=True),
        Setup("bf16", 4, dims=16, value_dims=24),
        Setup("saw-int4:block=7", 4, shared=True, sinks=True),
        Setup("int4", 3, shared=True),
        *BY_PAGE,
    ]
    return result


def describe(setup: Setup) -> str:
    values = "" if setup.value_bits is None else f"-v{setup.value_bits}"
    values += "-v-by-channel" if setup.value_by_channel else ""
    values += "-shared" if setup.shared else ""
    values += f"-dv{setup.value_dims}" if setup.value_dims else ""
    values += ("-sinks" if setup.sinks else "") + (f"-cap{setup.cap}" if setup.cap else "")
    return f"{setup.recipe}-page{setup.page_size}-{setup.kv_heads}x{setup.ratio}-d{setup.dims}{values}"


@pytest.mark.parametrize("setup", setups(), ids=describe)
def test_random_histories(setup, monkeypatch):
    rng = random.Random(describe(setup))
    monkeypatch.setattr(attend_torch, "CHUNK_TOKENS", rng.choice((3, 20, 1024)))
    world = World(setup, 3, rng.randrange(2**31))
    world.step([rng.randrange(1, 50), 0, rng.randrange(1, 20)])
    operations = ["decode"] * 4 + ["extend"] * 3 + ["crop"] * 3 + ["select"] * 2 + ["fail"]
    for _ in range(14):
        sequences, operation = len(world.rows), rng.choice(operations)
        if operation == "decode":
            world.step([1] * sequences)
        elif operation == "extend":
            largest = rng.choice((2, 6, 36))
            world.step([rng.randrange(largest + 1) for _ in range(sequences)])
        elif operation == "crop":
            last = [top - start for start, top in zip(world.starts, world.tops, strict=True)]
            some = [rng.choice((0, 1, 3, count, rng.randrange(60))) for count in last]
            world.crop([min(count, len(tokens)) for count, tokens in zip(some, world.rows, strict=True)])
        elif operation == "select":
            world.select([rng.randrange(sequences) for _ in range(rng.choice((2, 3, 4)))])
        else:
            world.failing_step([rng.randrange(1, 5) for _ in range(sequences)], rng.randrange(LAYERS))
    world.step([1] * len(world.rows))


def test_a_page_is_quantized_when_it_fills_and_not_before():
    setup = Setup("kivi-2:group=8,block=0", 4)
    cache = make_cache(setup, 1)
    tokens = torch.randn(12, LAYERS, 2, setup.kv_heads, setup.dims, generator=torch.Generator().manual_seed(0))
    for count, (token,) in enumerate(tokens.split(1), start=1):
        feed(setup, cache, token[None])
        for layer in range(LAYERS):
            codes, meta = key_views(cache.layouts[layer], cache.pools[layer])
            for number, page in enumerate(cache.tables.pages[0]):
                untouched = (codes[page] == 0xFF).all() and (meta[page].view(torch.int16) == -1).all()
                assert untouched == (count < 4 * (number + 1))


# --- how tokens were fed does not matter


def feed(setup: Setup, cache: PagedCache, tokens: torch.Tensor, row: int = 0) -> list:
    """Store tokens [n, layers, 2, kv_heads, d] of one sequence in one step; returns what `store` gave, by layer."""
    counts = [0] * len(cache.lengths)
    counts[row] = len(tokens)
    cache.extend(counts)
    return [naive.store(cache.pages(layer), *tokens[:, layer].unbind(1)) for layer in range(LAYERS)]


def last_read(cache: PagedCache, layer: int, position: int, new: tuple | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the query at `position` reads, of the one sequence that the last step fed."""
    return naive.read(cache.pages(layer), 0, position, new)


def live_bytes(cache: PagedCache, layer: int, row: int) -> list[bytes]:
    """Codes and metadata of each token of a sequence; none where the page has yet to be quantized as a whole."""
    layout, size, result = cache.layouts[layer], cache.tables.page_size, []
    pool, length = cache.pools[layer], cache.lengths[row]
    for token in range(length):
        page = cache.tables.pages[row][token // size]
        views = [
            view
            for slot, both in ((layout.key, key_views(layout, pool)), (layout.value, value_views(layout, pool)))
            for view in both
            if not slot.per_page or token < length // size * size
        ]
        result.append(b"".join(view[page, :, token % view.shape[2]].contiguous().numpy().tobytes() for view in views))
    return result


def fed_in_chunks(sizes: Sequence[int]):
    def run(setup: Setup, tokens: torch.Tensor) -> tuple[PagedCache, int, list]:
        cache, new = make_cache(setup, 1, shuffled=sum(sizes) + len(sizes)), []
        chunks = itertools.chain(sizes, itertools.repeat(sizes[-1]))
        while len(tokens):
            part, tokens = tokens.split([size := min(next(chunks), len(tokens)), len(tokens) - size])
            new = feed(setup, cache, part)
        return cache, 0, new

    return run


def fed_among_others(setup: Setup, tokens: torch.Tensor) -> tuple[PagedCache, int, list]:
    """The middle row of a batch whose other rows come and go."""
    cache, new = make_cache(setup, 3, shuffled=5), []
    noise = torch.randn(200, *tokens.shape[1:], generator=torch.Generator().manual_seed(9)).to(tokens.dtype)
    for index, part in enumerate(tokens.split(11)):
        feed(setup, cache, noise[index : index + 5], row=2)
        new = feed(setup, cache, part, row=1)
        if index == 2:
            cache.crop([0, 0, cache.lengths[2]])
    return cache, 1, new


def fed_with_rollbacks(setup: Setup, tokens: torch.Tensor) -> tuple[PagedCache, int, list]:
    """Every step brings wrong tokens at its end, which are taken back."""
    cache, new = make_cache(setup, 1, shuffled=6), []
    noise = torch.randn(30, *tokens.shape[1:], generator=torch.Generator().manual_seed(9)).to(tokens.dtype)
    parts = tokens.split(9)
    for index, part in enumerate(parts):
        if part is parts[-1]:
            new = feed(setup, cache, part)
        else:
            wrong = noise[: 1 + 7 * index % 29]
            feed(setup, cache, torch.cat((part, wrong)))
            cache.crop([len(wrong)])
    return cache, 0, new


def fed_as_a_fork(setup: Setup, tokens: torch.Tensor) -> tuple[PagedCache, int, list]:
    """Shares its first half with two others, which go on with something else, and drop out."""
    cache = make_cache(setup, 1, shuffled=7)
    noise = torch.randn(20, *tokens.shape[1:], generator=torch.Generator().manual_seed(9)).to(tokens.dtype)
    half = len(tokens) // 2
    feed(setup, cache, tokens[:half])
    cache.select([0, 0, 0])
    feed(setup, cache, noise, row=0)
    feed(setup, cache, tokens[half:-3], row=1)
    feed(setup, cache, noise[:3], row=2)
    cache.select([2, 1])
    return cache, 1, feed(setup, cache, tokens[-3:], row=1)


WAYS = {
    "odd chunks": fed_in_chunks((7, 13, 1, 29)),
    "chunks of a page": fed_in_chunks((16,)),
    "token by token": fed_in_chunks((1,)),
    "prefill and decode": fed_in_chunks((70, 1)),
    "among others": fed_among_others,
    "with rollbacks": fed_with_rollbacks,
    "as a fork": fed_as_a_fork,
}


TOKENS = 93
FEEDINGS = [
    Setup("saw-int4:values=true,block=20", 16, dtype=torch.bfloat16),
    Setup("saw-int4:block=20", 3, dims=64),
    Setup("int2:skip=1,group=8,block=7", 16),
    Setup("int4", 16, dtype=torch.float16),
    Setup("quarot-int2:block=40", 1, centred=False),
    Setup("bf16", 5),
    Setup("saw-int4:block=20", 4, value_bits=2),
    Setup("kmeans-saw-int4:centroids=20", 16),
    Setup("oscar-int2:block=7", 16),
    Setup("gtq-k3v4:block=7", 16, dtype=torch.bfloat16),
    Setup("gtq-k3v4:widths=all,per_head=true,block=7", 16),
    *BY_PAGE,
]


@functools.cache
def fed_at_once(setup: Setup) -> tuple[torch.Tensor, list[list[bytes]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tokens, and for each layer their bytes and what the last position reads after one single step."""
    shape = (TOKENS, LAYERS, 2, setup.kv_heads, setup.dims)
    tokens = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(2)) + 1).to(setup.dtype)
    cache, row, new = fed_in_chunks((TOKENS,))(setup, tokens)
    stored = [live_bytes(cache, layer, row) for layer in range(LAYERS)]
    return tokens, stored, [last_read(cache, layer, TOKENS - 1, new[layer]) for layer in range(LAYERS)]


@pytest.mark.parametrize("setup", FEEDINGS, ids=describe)
def test_what_the_last_position_reads(setup):
    """Token by token: the 16-bit form in the open block, the packed form elsewhere."""
    tokens, _, reads = fed_at_once(setup)
    for layer, which in itertools.product(range(LAYERS), range(2)):
        side = sides(setup, layer)[which]
        stored = side.stored(tokens[:, layer, which])
        all_packed = side.packed(stored, setup.page_size)
        opened = (TOKENS - 1) // setup.block * setup.block if setup.block else TOKENS
        for j in range(TOKENS):
            expected = stored[j, 0] if j >= opened else all_packed[j]
            error = np.abs(reads[layer][which][j].numpy() - expected).max()
            assert error <= 2**-21 * np.abs(expected).max()  # at position 0 a sum of larger numbers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setup", FEEDINGS, ids=describe)
def test_chunks_change_no_byte_and_no_read(setup, way):
    tokens, stored, reads = fed_at_once(setup)
    cache, row, new = WAYS[way](setup, tokens)
    assert cache.lengths[row] == TOKENS
    for layer in range(LAYERS):
        assert live_bytes(cache, layer, row) == stored[layer]
        for mine, theirs in zip(last_read(cache, layer, TOKENS - 1, new[layer]), reads[layer], strict=True):
            assert mine.isfinite().all()
            assert same_bits(mine, theirs)


# --- the implementation in PyTorch


@pytest.mark.pairs
@pytest.mark.parametrize("block_tokens", [1, 16, 100, 1024])
@pytest.mark.parametrize(
    ("block_logits", "part"), [(1, "_flash"), (600, "_softmax"), (2**23, "_flash"), (2**23, "_softmax")]
)
@pytest.mark.parametrize(
    "setup",
    [
        Setup("saw-int4:values=true,block=11", 4, 2, 3),
        Setup("int2:group=8", 16, 1, 4),
        Setup("int4:block=300", 16, 2, 1),
        Setup("int8", 3, 2, 2),
        Setup("bf16", 7, 2, 2),
        Setup("kivi-2:group=8,block=11", 4),
        Setup("kitty-2:block=2,boost=0.5", 16),
        Setup("kmeans-int4:centroids=9,block=3", 4),
    ],
    ids=describe,
)
def test_blocks_of_any_size_give_the_same(setup, block_tokens, block_logits, part, monkeypatch):
    generator = torch.Generator().manual_seed(block_tokens)
    cache = make_cache(setup, 3, shuffled=1)
    heads = setup.kv_heads * setup.ratio
    for counts in ([70, 3, 0], [4, 4, 2]):
        kv = torch.randn(2, sum(counts), setup.kv_heads, setup.dims, generator=generator)
        q = torch.randn(sum(counts), heads, setup.dims, generator=generator)
        cache.extend(counts)
        pages = cache.pages(1)
        new = naive.store(pages, *kv)
    monkeypatch.setattr(attend_torch, "CHUNK_TOKENS", block_tokens)
    monkeypatch.setattr(attend_torch, "CPU_LOGITS", block_logits)
    monkeypatch.setattr(attend_torch, "_flash", getattr(attend_torch, part))  # on a GPU it is the other
    expected = naive.attend(pages, q, new, setup.logits)
    assert torch.allclose(attend_torch.attend(pages, q, new, setup.logits), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", ["int8", "int8:block=8", "bf16"])
@pytest.mark.parametrize("block_tokens", [4, 4096])
def test_tokens_that_a_query_does_not_read_do_not_touch_it(recipe, block_tokens, monkeypatch):
    """Later tokens of the same step have values ten million times as large; not even their rounding errors may show."""
    monkeypatch.setattr(attend_torch, "CHUNK_TOKENS", block_tokens)
    setup = Setup(recipe, page_size=4, centred=False)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 2, 40, setup.kv_heads, setup.dims, generator=generator)
    q = torch.randn(2, 40, setup.kv_heads * setup.ratio, setup.dims, generator=generator)
    kv[1] *= 1e-3
    kv[1, :, 20:] *= 1e7
    outputs = []
    for counts in ([40, 37], [20, 17]):  # the second time, without the large ones
        cache, n = make_cache(setup, 2, shuffled=1), max(counts)
        cache.extend(counts)
        outputs.append(cache.attend(0, q[:, :n], *kv[:, :, :n], setup.logits)[:, :20])
    for row, padding in enumerate((0, 3)):
        together, alone = (out[row, padding:] for out in outputs)
        assert alone.abs().max() < 0.01
        assert torch.allclose(together, alone, rtol=1e-4, atol=1e-8)


def test_large_logits_do_not_overflow():
    setup = Setup("int4:block=3", 4, centred=False)
    cache = make_cache(setup, 1)
    kv = 100 * torch.randn(2, 30, setup.kv_heads, setup.dims, generator=torch.Generator().manual_seed(0))
    q = 1000 * torch.randn(30, setup.kv_heads * setup.ratio, setup.dims, generator=torch.Generator().manual_seed(1))
    cache.extend([30])
    pages = cache.pages(0)
    new = naive.store(pages, *kv)
    expected, got = (op.attend(pages, q, new, Logits(1.0)) for op in (naive, attend_torch))
    assert got.isfinite().all()
    # logits reach 10^6, so that float32 leaves a tenth of rounding in them: ties apart, the same token wins
    agree = ((got - expected).abs().amax(dim=-1) < 1.0).float().mean()
    assert agree > 0.98


# --- single promises


def test_a_step_without_tokens_changes_nothing():
    world = World(Setup(), 2, seed=3)
    world.step([10, 0])
    before = world.snapshot()[1]
    world.step([0, 0])
    assert world.snapshot()[1] == before
    world.step([1, 1])


def test_what_only_the_window_cannot_hold_is_refused():
    """70000 packs, as the upper end of a range, but is no float16."""
    setup = Setup("int4:block=8", centred=False, raw_dtype=torch.float16)
    cache = make_cache(setup)
    kv = torch.rand(2, 1, 5, setup.kv_heads, setup.dims)
    q = torch.rand(1, 5, setup.kv_heads * setup.ratio, setup.dims)
    kv[0, 0, 4, 0, 0] = 70000
    cache.extend([5])
    with pytest.raises(ValueError, match="beyond the range of 16-bit floats"):
        cache.attend(0, q, *kv, setup.logits)


@pytest.mark.parametrize(
    ("setup", "side"),
    [
        (Setup("kivi-2:group=8,block=0", centred=False), 0),
        (Setup("kitty-2:block=3,boost=0.5", centred=False), 0),
        (Setup("int4", centred=False, value_by_channel=True), 1),
        (Setup("kivi-4:group=8", centred=False, value_by_channel=True), 1),
    ],
    ids=lambda part: describe(part) if isinstance(part, Setup) else str(part),
)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_full_page_could_not_hold_is_refused_when_it_arrives(setup, side, sign):
    """65536 is a bfloat16, but neither a 16-bit scale nor an offset can be one; 65280 is the largest below."""
    cache = make_cache(setup)
    kv = torch.rand(2, 1, 3, setup.kv_heads, setup.dims)
    q = torch.rand(1, 3, setup.kv_heads * setup.ratio, setup.dims)
    cache.extend([2])  # of the 4 tokens of a page
    cache.attend(0, q[:, :2], *kv[:, :, :2], setup.logits)
    cache.extend([1])
    kv[side, 0, 2, 1, 3] = sign * 65536
    with pytest.raises(ValueError, match="cannot store NaN, Inf or numbers beyond"):
        cache.attend(0, q[:, 2:], *kv[:, :, 2:], setup.logits)
    cache.crop([1])
    cache.extend([1])
    kv[side, 0, 2, 1, 3] = sign * 65280
    cache.attend(0, q[:, 2:], *kv[:, :, 2:], setup.logits)
    cache.extend([2])  # with the opposite one the page is full: the widest range that there is
    kv[side, 0, 0, 1, 3] = -sign * 65280
    assert cache.attend(0, q[:, :2], *kv[:, :, :2], setup.logits).isfinite().all()


def test_a_single_bit_by_channel_spans_half_the_range():
    """Its scale is the whole difference of two numbers."""
    codec = Codec(channel_slot(16, 1))
    cache = PagedCache([(codec, codec)], 1, 1, page_size=2)
    kv = torch.zeros(2, 1, 1, 1, 16)
    kv[0, ..., 3] = 32640
    cache.extend([1])
    cache.attend(0, torch.zeros(1, 1, 1, 16), *kv, Logits(1.0))
    kv[0, ..., 3] = 32768  # the next bfloat16
    cache.extend([1])
    with pytest.raises(ValueError, match="cannot store"):
        cache.attend(0, torch.zeros(1, 1, 1, 16), *kv, Logits(1.0))


def test_a_page_that_is_quantized_as_a_whole_has_two_tokens_at_least():
    for recipe in ("kivi-2:group=8,block=0", "kivi-2:group=8", "kitty-2:boost=0.5"):
        with pytest.raises(ValueError, match=r"at least 2 tokens, not page_size=1"):
            make_cache(Setup(recipe, page_size=1))


@pytest.mark.parametrize("recipe", ["int4:block=6", "kivi-2:group=8,block=6"])
def test_a_refused_crop_says_what_would_allow_it(recipe):
    setup = Setup(recipe)
    cache = make_cache(setup)
    for count in (10, 200):
        cache.extend([count])
    with pytest.raises(ValueError, match=f"cannot roll back to 51 tokens: with block={setup.block} at most") as caught:
        cache.crop([159])
    assert str(caught.value).endswith("use a recipe with block=0")
    assert cache.lengths == [210]


def test_what_may_be_rolled_back_with_an_open_block():
    world = World(Setup("int4:block=6", page_size=4), 2, seed=5)
    world.step([20, 20])
    world.step([180, 180])
    assert not world.crop([101, 0]), "the 16-bit vectors before position 99 are gone"
    assert not world.crop([0, 179])
    assert world.crop([20, 64])
    assert world.crop([12, 0])
    world.step([1, 3])
    world.step([90, 2])
    assert world.crop([90, 2]), "a whole step can be taken back, however long"
    world.step([2, 2])
    assert world.crop([len(world.rows[0]), 0]), "everything can be forgotten"
    world.step([3, 1])
    world.step([1, 200])
    assert not world.crop([0, 99]), "whatever the lengths of the others"
    assert world.crop([1, 32])
    world.step([2, 1])
    assert world.crop([0, len(world.rows[1]) % 6 + 60]), "to the border of any block"
    world.step([2, 70])


@pytest.mark.parametrize("counts", [[11, 0], [0, -1], [-3, -3], [0, 9], [1], [1, 1, 1]])
def test_impossible_crops_are_refused(counts):
    cache = make_cache(Setup(), 2)
    cache.extend([10, 8])
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the language's own for a wrong number of rows
        cache.crop(counts)
    assert cache.lengths == [10, 8]


def test_forks_do_not_see_each_others_tokens():
    """Two continuations of one prefix read what they would have read alone, bit for bit, and share its pages."""
    setup = Setup("saw-int4:block=8", page_size=4)
    generator = torch.Generator().manual_seed(1)
    prefix, left, right = (
        torch.randn(n, LAYERS, 2, setup.kv_heads, setup.dims, generator=generator) for n in (18, 7, 7)
    )
    cache = make_cache(setup, 1)
    feed(setup, cache, prefix)
    cache.select([0, 0])
    assert cache.tables.pages[0] == cache.tables.pages[1]
    for step in range(7):
        feed(setup, cache, left[step : step + 1], row=0)
        new = feed(setup, cache, right[step : step + 1], row=1)
    assert cache.tables.pages[0][:4] == cache.tables.pages[1][:4]
    assert not set(cache.tables.pages[0][4:]) & set(cache.tables.pages[1][4:])
    for row, rest in enumerate((left, right)):
        alone = make_cache(setup, 1)
        alone_new = feed(setup, alone, torch.cat((prefix, rest)))
        for layer in range(LAYERS):
            assert live_bytes(cache, layer, row) == live_bytes(alone, layer, 0)
            if row:
                got = last_read(cache, layer, 24, new[layer])
                expected = last_read(alone, layer, 24, alone_new[layer])
                assert all(same_bits(*pair) for pair in zip(got, expected, strict=True))


# --- memory


@pytest.mark.parametrize(
    "setup",
    [Setup(), Setup("int4", 16), Setup("int2:block=16", 1), Setup("kivi-2:group=8,block=0", 16)],
    ids=describe,
)
def test_token_by_token_growth_takes_a_sixteenth_more_than_is_needed(setup):
    cache = make_cache(setup, 2)
    for length in range(1, 400):
        cache.extend([1, 1])
        pages = 2 * -(-length // setup.page_size)
        for layer in range(LAYERS):
            assert len(cache.pools[layer]) <= pages * 17 / 16 + 1
            numbers = (setup.block + ROLLBACK) * setup.kv_heads * 2 * setup.dims if setup.block else 0
            assert cache.rings[layer].numel() == 2 * numbers
    assert cache.allocated_bytes == sum(tensor.nbytes for tensor in (*cache.pools, *cache.rings))


def test_growth_keeps_what_is_stored():
    setup = Setup("int4:block=100", page_size=2)
    tokens = torch.randn(120, LAYERS, 2, setup.kv_heads, setup.dims, generator=torch.Generator().manual_seed(3))
    cache, kept = make_cache(setup, 1), []
    for token in tokens.split(1):
        feed(setup, cache, token)
        now = live_bytes(cache, 0, 0)
        assert now[:-1] == kept
        kept = now


@pytest.mark.parametrize("block", [0, 1, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_beam_search_leaks_nothing(block, page_size):
    """Beams fork and die at every step; pages stay within what the longest moment needs."""
    setup, rng = Setup(f"int4:block={block}", page_size), random.Random(page_size)
    cache = make_cache(setup, 4)
    cache.extend([10] * 4)
    peak = 0
    for step in range(150):
        cache.select([rng.randrange(4) for _ in range(4)])
        cache.extend([1] * 4)
        if step % 50 == 49:
            if block:
                cache.select([0] * 4)
            else:
                cache.crop([30] * 4)
        peak = max(peak, len({page for pages in cache.tables.pages for page in pages}))
    # a fork's copy may come before its source is given up: at most one page for each beam
    assert cache.tables.capacity <= peak + 4
    assert all(len(pool) <= (peak + 4) * 17 / 16 + 1 for pool in cache.pools)
    assert all(len(ring) == (4 if block else 0) for ring in cache.rings)


def test_layers_stored_in_sixteen_bits_have_no_rings():
    cache = make_cache(Setup("int4:skip=1,block=8"), 2)
    cache.extend([50, 20])
    assert len(cache.rings[0])
    assert not len(cache.rings[1])


def test_a_cropped_cache_is_used_again():
    cache = make_cache(Setup("int4"), 2)
    cache.extend([64, 64])
    allocated = cache.allocated_bytes
    for _ in range(20):
        cache.crop([64, 60])
        cache.extend([64, 60])
    assert cache.allocated_bytes == allocated


@pytest.mark.usefixtures("_untouched_memory")
def test_pages_past_two_gibibytes():
    """Pages at both ends of a pool of more than 2^31 bytes, of which only those are ever touched."""
    setup = Setup("saw-int4:block=7", page_size=16, dims=128)
    page_bytes = make_cache(setup).pools[0].shape[1:].numel()
    pages = 2**31 // page_bytes + 1000
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large, small = make_cache(setup, 2), make_cache(setup, 2)
    large.tables.references = [0] * pages
    large.tables.free = [*range(5), *range(pages - 8, pages)]  # taken from the end
    generator = torch.Generator().manual_seed(0)
    heads = setup.kv_heads * setup.ratio
    for counts in ([90, 70], [1, 1], [3, 1]):
        n = max(counts)
        kv = torch.randn(2, 2, n, setup.kv_heads, setup.dims, generator=generator)
        q = torch.randn(2, n, heads, setup.dims, generator=generator)
        for cache in (large, small):
            cache.extend(counts)
        outputs = [cache.attend(0, q, *kv, setup.logits) for cache in (large, small)]
        for row, count in enumerate(counts):
            assert torch.equal(outputs[0][row, n - count :], outputs[1][row, n - count :])
    assert large.pools[0].nbytes > 2**31
    used = {page for pages_ in large.tables.pages for page in pages_}
    assert max(used) * page_bytes > 2**31
    assert min(used) < 5
    for row in range(2):
        assert live_bytes(large, 0, row) == live_bytes(small, 0, row)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert grown < 256 * 1024, f"{grown} KiB of memory were touched"
