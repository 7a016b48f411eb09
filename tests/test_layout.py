import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_views import key_views, value_views

from kvfold.format.layout import (
    PageLayout,
    Segment,
    SlotLayout,
    affine_slot,
    channel_slot,
    codebook_slot,
    even_slot,
    mixed_slot,
    raw_slot,
)


@pytest.mark.parametrize(
    ("bits", "dims", "group", "code_bytes", "slot_bytes"),
    [
        (8, 64, None, 64, 68),
        (4, 80, None, 40, 44),
        (4, 256, None, 128, 132),
        (2, 96, None, 24, 28),
        (3, 128, None, 48, 52),
        # groups: 4 bytes of metadata for each
        (4, 80, 40, 40, 48),
        (4, 128, 64, 64, 72),
        (2, 80, 20, 20, 36),
        (2, 256, 128, 64, 72),
        (8, 80, 5, 80, 144),
        (4, 128, 128, 64, 68),
    ],
)
def test_bytes_of_a_slot(bits, dims, group, code_bytes, slot_bytes):
    slot = affine_slot(dims, bits, group)
    assert (slot.dims, slot.code_bytes, slot.slot_bytes) == (dims, code_bytes, slot_bytes)
    assert slot.meta_bytes == slot_bytes - code_bytes
    assert len(slot.segments) == (slot_bytes - code_bytes) // 4


EVEN = {
    "fold2": ([(32, 4), (64, 2), (32, 1)], [(128, 2)], 72),
    "fold3": ([(64, 4), (32, 2), (32, 1)], [(64, 4), (64, 2)], 97),
    "fold4": ([(32, 8), (32, 4), (64, 2)], [(128, 4)], 132),
    "small": ([(8, 1), (16, 2), (8, 8)], [(8, 4), (24, 1)], 25),
}


@pytest.mark.parametrize(("key", "value", "token"), EVEN.values(), ids=EVEN)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_evenly_spaced_levels_have_arrays_of_their_own(key, value, token, page_size):
    """Each begins at a multiple of 16 bytes, and none overlaps another; together they are as small as can be."""
    layout = PageLayout(even_slot(key), even_slot(value), page_size)
    assert layout.key.slot_bytes + layout.value.slot_bytes == token
    places = [
        (width, place)
        for side, widths in enumerate((key, value))
        for width, place in zip(widths, layout.places(side), strict=True)
    ]
    arrays = [(place.codes, dims * bits // 8, place.code_stride) for (dims, bits), place in places]
    arrays += [(place.meta, 1, place.meta_stride) for _, place in places]
    end = 0
    for start, size, stride in arrays:
        assert stride == size
        assert start == -(-end // 16) * 16
        end = start + page_size * size
    assert layout.page_bytes == -(-end // 16) * 16


def test_views_of_evenly_spaced_levels_are_where_their_places_are():
    key, value, _ = EVEN["fold3"]
    layout = PageLayout(even_slot(key), even_slot(value), 5)
    pool = layout.allocate(3, 2).random_(generator=torch.Generator().manual_seed(1))
    for side, views in enumerate(layout.views(pool, together=False)):
        page, offset = torch.tensor([2, 0]), torch.tensor([4, 1])
        codes, scales = views.read(page, offset)  # [tokens, kv_heads, 1, …]
        for token, head in ((0, 0), (0, 1), (1, 1)):
            row = pool[page[token], head].tolist()
            expected: list[int] = []
            for segment, place in zip((layout.key, layout.value)[side].segments, layout.places(side), strict=True):
                first = place.codes + int(offset[token]) * place.code_stride
                expected += row[first : first + segment.code_bytes]
            assert codes[token, head, 0].tolist() == expected
            metas = [place.meta + int(offset[token]) * place.meta_stride for place in layout.places(side)]
            assert scales[token, head, 0].tolist() == [row[at] for at in metas]


@pytest.mark.parametrize("bits", [0, 3, 5, 6, 7, 16])
def test_other_widths_of_evenly_spaced_levels_are_refused(bits):
    with pytest.raises(ValueError, match=f"have 1, 2, 4 or 8 bits, not {bits}"):
        even_slot([(32, 4), (32, bits)])


def test_evenly_spaced_levels_mix_with_no_other_rule():
    segments = Segment(0, 32, 4, "even"), Segment(32, 64, 4)
    with pytest.raises(ValueError, match="mix with no other rule"):
        SlotLayout(segments)
    with pytest.raises(ValueError, match="mix with no other rule"):
        SlotLayout(segments[:1], centroid=True)


@pytest.mark.parametrize(
    ("bits", "dims", "page_size", "page_bytes"),
    [
        # 16·(64 + 64) codes and 16·(4 + 4) metadata: 4.25 bits for each of 16·2·128 numbers
        (4, 128, 16, 2176),
        (2, 128, 16, 1152),
        (8, 128, 16, 4224),
        (4, 64, 16, 1152),
        (2, 64, 16, 640),
        (4, 80, 16, 1408),
        # one token: 40 bytes of codes take 48, 4 of metadata take 16
        (4, 80, 1, 128),
        # three tokens: 3·20 = 60 take 64, 12 take 16
        (2, 80, 3, 160),
        (2, 96, 3, 192),  # 72 take 80, 12 take 16
        (4, 256, 64, 16896),
    ],
)
def test_bytes_of_a_page(bits, dims, page_size, page_bytes):
    slot = affine_slot(dims, bits)
    assert PageLayout(slot, slot, page_size).page_bytes == page_bytes


@pytest.mark.parametrize(("dims", "page_size", "page_bytes"), [(128, 16, 8192), (80, 1, 320), (64, 3, 768)])
def test_bytes_of_a_raw_page(dims, page_size, page_bytes):
    assert PageLayout(raw_slot(dims), raw_slot(dims), page_size).page_bytes == page_bytes


@pytest.mark.parametrize(
    ("widths", "code_bytes", "slot_bytes"),
    [
        ([(128, 3)], 48, 50),  # 3.125 bits for each of 128 numbers
        ([(64, 3)], 24, 26),
        ([(80, 1)], 10, 12),
        # 16·5 + 80·3 + 32·2 = 384 = 3·128 bits, and a norm for each width
        ([(16, 5), (80, 3), (32, 2)], 48, 54),
        ([(8, 8), (8, 7), (8, 1)], 16, 22),
        # codes are padded to whole bytes of every plane: 16 of 3 bits, 8 of 7, 24 of 1
        ([(10, 3), (2, 7), (20, 1)], 6 + 7 + 3, 16 + 6),
    ],
)
def test_bytes_of_a_codebook_slot(widths, code_bytes, slot_bytes):
    slot = codebook_slot(widths)
    assert (slot.code_bytes, slot.slot_bytes, slot.meta_bytes) == (code_bytes, slot_bytes, slot_bytes - code_bytes)
    assert [(segment.dims, segment.bits) for segment in slot.segments] == widths
    assert slot.dims == sum(dims for dims, _ in widths)
    assert not slot.per_page


def test_slots_of_heads_with_layouts_of_their_own_are_as_large_as_the_largest():
    heads = [codebook_slot(widths) for widths in ([(16, 4), (16, 1)], [(32, 2)], [(8, 4), (8, 3), (16, 1)])]
    assert [(head.code_bytes, head.meta_bytes) for head in heads] == [(10, 4), (8, 2), (9, 6)]
    slot = mixed_slot(heads)
    assert (slot.dims, slot.code_bytes, slot.meta_bytes, slot.slot_bytes) == (32, 10, 6, 16)
    assert PageLayout(slot, slot, 16).page_bytes == 16 * 2 * 16


@pytest.mark.parametrize(
    ("dims", "bits", "boosted", "code_bytes", "meta_bytes"),
    [
        (128, 2, 0, 32, 512),  # a scale and an offset for each channel of a page
        (128, 4, 0, 64, 512),
        (64, 2, 0, 16, 256),
        (128, 2, 32, 40, 544),  # the high bits of 32 channels, and their numbers
        (64, 2, 16, 20, 272),
        (256, 2, 64, 80, 1088),
        (64, 4, 8, 36, 264),
    ],
)
def test_bytes_of_a_channel_slot(dims, bits, boosted, code_bytes, meta_bytes):
    slot = channel_slot(dims, bits, boosted)
    assert (slot.dims, slot.code_bytes, slot.meta_bytes) == (dims, code_bytes, meta_bytes)
    assert slot.per_page
    assert slot.slot_bytes == code_bytes, "metadata belong to the page"


@pytest.mark.parametrize(
    ("key", "value", "page_size", "page_bytes"),
    [
        # K codes 32·32, V codes 32·32, K metadata 2·128·2, V metadata 32·4·4: 3 bits for each of 32·2·128 numbers
        (channel_slot(128, 2), affine_slot(128, 2, 32), 32, 3072),
        # 128·40, 128·32, 544, 128·4
        (channel_slot(128, 2, 32), affine_slot(128, 2), 128, 10272),
        # 3·6 and 3·8 take 32 each, 2·16·2 + 8 take 80, 12 take 16
        (channel_slot(16, 2, 8), affine_slot(16, 4), 3, 32 + 32 + 80 + 16),
        (codebook_slot([(128, 3)]), codebook_slot([(128, 2)]), 16, 16 * (48 + 32 + 2 + 2)),
    ],
)
def test_bytes_of_a_page_of_other_rules(key, value, page_size, page_bytes):
    assert PageLayout(key, value, page_size).page_bytes == page_bytes


def test_bits_of_keys_and_of_values():
    """4-bit keys with 32 bits of metadata per token; 2-bit values with 32 bits per page of 16 tokens and coordinate."""
    layout = PageLayout(affine_slot(64, 4), channel_slot(32, 2), 16)
    assert layout.side_bits == (4 + 32 / 64, 2 + 32 / 16)
    # a page of 3 tokens is padded to arrays of 16 bytes: 96 and 16 for keys, 192 for values
    assert PageLayout(affine_slot(64, 4), raw_slot(32), 3).side_bits == (8 * 112 / 192, 16)


def test_the_open_block_of_a_layer():
    affine, channel, raw = affine_slot(16, 4), channel_slot(16, 4), raw_slot(16)
    for key, value in ((affine, affine), (affine, raw)):
        assert [PageLayout(key, value, 32).block(block) for block in (0, 20, 64)] == [0, 20, 64]
    for key, value in ((channel, affine), (affine, channel)):  # whole pages
        assert [PageLayout(key, value, 32).block(block) for block in (0, 32, 40, 64)] == [32, 32, 160, 64]
    assert PageLayout(raw, raw, 32).block(64) == 0


@st.composite
def slots(draw) -> SlotLayout:
    """Segments of any widths and rules, raw ones among them, with a centroid or not; or one for whole pages."""
    if draw(st.integers(0, 4)) == 0:
        dims = 8 * draw(st.integers(1, 8))
        return channel_slot(dims, draw(st.sampled_from((1, 2, 4))), 8 * draw(st.integers(0, dims // 8)))
    segments, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        rule = draw(st.sampled_from(("affine", "affine", "raw", "codebook")))
        stop = start + (draw(st.integers(1, 40)) if rule == "codebook" else 8 * draw(st.integers(1, 6)))
        segments.append(Segment(start, stop, draw(st.integers(1, 8)), rule))
        start = stop
    return SlotLayout(tuple(segments), draw(st.booleans()))


@st.composite
def page_layouts(draw) -> PageLayout:
    key, value = draw(slots()), draw(slots())
    smallest = 2 if key.per_page or value.per_page else 1
    return PageLayout(key, value, max(smallest, draw(st.sampled_from((1, 2, 3, 7, 16, 64)))))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(page_layouts(), st.integers(1, 3), st.integers(1, 3))
def test_arrays_of_a_page_are_disjoint_aligned_and_cover_it(layout, pages, heads):
    pool = layout.allocate(pages, heads)
    assert pool.shape == (pages, heads, layout.page_bytes)
    assert pool.dtype == torch.uint8
    pool.zero_()
    views = (*key_views(layout, pool), *value_views(layout, pool))
    slots = (layout.key, layout.key, layout.value, layout.value)
    for index, (view, slot) in enumerate(zip(views, slots, strict=True)):
        is_meta = index % 2
        width = slot.meta_bytes // 2 if is_meta else slot.code_bytes
        rows = 1 if is_meta and slot.per_page else layout.page_size
        assert view.shape == (pages, heads, rows, width)
        assert view.dtype == (torch.float16 if is_meta else torch.uint8)
        for page in range(pages) if view.numel() else ():
            for head in range(heads):
                assert (view[page, head].data_ptr() - pool.data_ptr()) % 16 == 0
        # the bytes of this array, among all bytes of the pool
        if is_meta:
            view.view(torch.int16).add_(0x0101 << index)
        else:
            view.add_(1 << index)
    marks = pool.tolist()
    for page in marks:
        for head in page:
            assert {0, 1, 2, 4, 8} >= set(head), "two arrays overlap"
            counts = [head.count(1 << index) for index in range(4)]
            size = layout.page_size
            assert counts == [
                size * layout.key.code_bytes,
                (1 if layout.key.per_page else size) * layout.key.meta_bytes,
                size * layout.value.code_bytes,
                (1 if layout.value.per_page else size) * layout.value.meta_bytes,
            ]
            # every array is whole, and only what rounds it up to 16 bytes is left over
            assert sum(-(-count // 16) * 16 for count in counts) == layout.page_bytes
            for index, count in enumerate(counts):
                if count:
                    begin = head.index(1 << index)
                    assert head[begin : begin + count] == [1 << index] * count


def test_order_of_the_arrays_and_of_the_tokens_in_them():
    """K codes, V codes, K metadata, V metadata; in each, token after token. Spelled out for 3 tokens."""
    layout = PageLayout(affine_slot(24, 4), affine_slot(16, 8), 3)
    page = torch.arange(layout.page_bytes, dtype=torch.uint8)
    # K codes 3·12 = 36 -> 48, V codes 3·16 = 48, K metadata 3·4 = 12 -> 16, V metadata 12 -> 16
    assert layout.page_bytes == 128
    k_codes, k_meta = key_views(layout, page)
    v_codes, v_meta = value_views(layout, page)
    assert k_codes.tolist() == [list(range(12)), list(range(12, 24)), list(range(24, 36))]
    assert v_codes.tolist() == [list(range(48, 64)), list(range(64, 80)), list(range(80, 96))]
    assert k_meta.view(torch.uint8).tolist() == [list(range(start, start + 4)) for start in (96, 100, 104)]
    assert v_meta.view(torch.uint8).tolist() == [list(range(start, start + 4)) for start in (112, 116, 120)]


def test_views_alias_the_pool():
    layout = PageLayout(affine_slot(128, 4, 64), affine_slot(128, 2), 16)
    pool = layout.allocate(3, 2)
    pool.fill_(0xFF)
    _, ((codes,), (meta,)) = ((views.codes, views.meta) for views in layout.views(pool, together=False))
    codes[2, 5, 1] = 7
    meta[2, 5, 1] = 1.0
    changed = (pool != 0xFF).nonzero()
    assert changed[:, :2].unique(dim=0).tolist() == [[2, 1]]
    # V codes follow 16·64 bytes of K codes; V metadata follows 16·32 bytes of V codes and 16·8 of K metadata
    v_codes, v_meta = 1024 + 5 * 32, 1024 + 512 + 128 + 5 * 4
    assert changed[:, 2].tolist() == [*range(v_codes, v_codes + 32), *range(v_meta, v_meta + 4)]
    assert pool[2, 1, v_meta : v_meta + 4].tolist() == [0x00, 0x3C, 0x00, 0x3C]  # float16 1.0, little endian


@settings(deadline=None, derandomize=True, max_examples=100)
@given(page_layouts(), st.booleans(), st.booleans())
def test_sides_are_the_same_bytes_as_keys_and_values(layout, alike, together):
    """Views apart where that is asked for, or where the layouts differ."""
    together &= alike
    if alike:
        layout = PageLayout(layout.key, layout.key, layout.page_size)
    pool = layout.allocate(3, 2).random_(generator=torch.Generator().manual_seed(1))
    views = (key_views(layout, pool), value_views(layout, pool))
    parts = layout.views(pool, together)
    assert [side for sides, _, _ in parts for side in range(2)[sides]] == [0, 1]
    assert len(parts) == (1 if together else 2)
    for sides, (codes,), (meta,) in parts:
        for place, side in enumerate(range(2)[sides]):
            for part, expected in zip((codes, meta), views[side], strict=True):
                got = part[:, :, :, place].transpose(1, 2)  # [pages, kv_heads, page_size, …]
                assert got.shape == expected.shape
                assert got.dtype == expected.dtype
                assert got.data_ptr() == expected.data_ptr() or not expected.numel()
                assert got.stride() == expected.stride() or not expected.numel()


def test_an_empty_pool_has_views():
    for slot in (affine_slot(64, 2), raw_slot(64)):
        layout = PageLayout(slot, slot, 16)
        for _, (codes,), (meta,) in layout.views(layout.allocate(0, 2), together=False):
            assert codes.shape == (0, 16, 2, 1, slot.code_bytes)
            assert meta.shape == (0, 16, 2, 1, slot.meta_bytes // 2)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(slots())
def test_split_gives_each_segment_its_codes_and_metadata(slot):
    codes = torch.arange(slot.code_bytes).expand(2, -1)
    meta = torch.arange(slot.meta_bytes // 2).expand(2, -1)
    code, entry = 0, 0
    per_rule = {"affine": 2, "codebook": 1, "raw": 0}
    parts = slot.split(codes, meta)
    assert [segment for segment, _, _ in parts] == list(slot.segments)
    for segment, part_codes, part_meta in parts:
        n = 2 * segment.dims if segment.rule == "raw" else (segment.dims + segment.boosted) * segment.bits // 8
        if segment.rule == "codebook":
            n = -(-segment.dims // 8) * segment.bits
        entries = slot.meta_entries if segment.rule == "channel" else per_rule[segment.rule]
        assert part_codes[1].tolist() == list(range(code, code + n))
        assert part_meta[1].tolist() == list(range(entry, entry + entries))
        code, entry = code + n, entry + entries
    assert (code, 2 * entry) == (slot.code_bytes, slot.meta_bytes - 2 * slot.centroid)


@pytest.mark.parametrize(("dims", "group"), [(128, 48), (64, 128), (80, 64), (64, 0), (64, -32)])
def test_groups_that_do_not_divide_are_refused(dims, group):
    with pytest.raises(ValueError, match=f"group={group} does not divide the head dimension {dims}"):
        affine_slot(dims, 4, group)


def test_groups_that_leave_bits_over_are_refused():
    with pytest.raises(ValueError, match="2 codes of 2 bits do not fill whole bytes"):
        affine_slot(64, 2, 2)


@pytest.mark.parametrize(
    "bounds", [((0, 8), (16, 24)), ((8, 16),), ((0, 16), (8, 24)), ((16, 32), (0, 16)), ((0, 8), (8, 16), (24, 32))]
)
def test_segments_with_gaps_or_overlaps_are_refused(bounds):
    with pytest.raises(ValueError, match="must follow each other from coordinate 0"):
        SlotLayout(tuple(Segment(start, stop, 4) for start, stop in bounds))


def test_a_slot_without_segments_is_refused():
    with pytest.raises(ValueError, match="at least one segment"):
        SlotLayout(())
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        SlotLayout((Segment(0, 0, 4),))


def test_a_slot_for_whole_pages_has_one_segment():
    channel, affine = Segment(0, 16, 2, "channel"), Segment(16, 32, 2)
    with pytest.raises(ValueError, match="whole pages has a single segment"):
        SlotLayout((channel, affine))


def test_boosted_channels_are_numbered_in_a_byte():
    assert channel_slot(256, 2, 64).meta_bytes == 2 * 2 * 256 + 64
    channel_slot(512, 2)
    with pytest.raises(ValueError, match="at most 256 dims, not 512"):
        channel_slot(512, 2, 128)


def test_boosted_channels_fill_whole_bytes():
    with pytest.raises(ValueError, match="3 codes of 2 bits do not fill whole bytes"):
        channel_slot(16, 2, 3)


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_without_tokens_is_refused(page_size):
    with pytest.raises(ValueError, match=f"at least one token, not {page_size}"):
        PageLayout(raw_slot(64), raw_slot(64), page_size)


@pytest.mark.parametrize("key_by_page", [True, False])
def test_a_page_that_is_quantized_as_a_whole_has_two_tokens_at_least(key_by_page):
    whole, other = channel_slot(64, 2), affine_slot(64, 4)
    sides = (whole, other) if key_by_page else (other, whole)
    with pytest.raises(ValueError, match="quantized as a whole it needs at least 2 tokens, not page_size=1"):
        PageLayout(*sides, 1)
    assert PageLayout(*sides, 2).page_bytes > PageLayout(other, other, 1).page_bytes
