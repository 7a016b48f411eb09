import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.layout import PageLayout, Segment, SlotLayout, affine_slot, raw_slot


@pytest.mark.parametrize(
    ("bits", "dims", "group", "code_bytes", "slot_bytes"),
    [
        (8, 64, None, 64, 68),
        (8, 80, None, 80, 84),
        (8, 96, None, 96, 100),
        (8, 128, None, 128, 132),
        (8, 256, None, 256, 260),
        (4, 64, None, 32, 36),
        (4, 80, None, 40, 44),
        (4, 96, None, 48, 52),
        (4, 128, None, 64, 68),
        (4, 256, None, 128, 132),
        (2, 64, None, 16, 20),
        (2, 80, None, 20, 24),
        (2, 96, None, 24, 28),
        (2, 128, None, 32, 36),
        (2, 256, None, 64, 68),
        (3, 128, None, 48, 52),
        # groups: 4 bytes of metadata for each
        (4, 64, 32, 32, 40),
        (4, 80, 40, 40, 48),
        (4, 96, 32, 48, 60),
        (4, 128, 32, 64, 80),
        (4, 128, 64, 64, 72),
        (4, 256, 32, 128, 160),
        (2, 64, 32, 16, 24),
        (2, 80, 20, 20, 36),
        (2, 96, 48, 24, 32),
        (2, 128, 64, 32, 40),
        (2, 256, 128, 64, 72),
        (8, 64, 16, 64, 80),
        (8, 80, 5, 80, 144),
        (4, 128, 128, 64, 68),
    ],
)
def test_bytes_of_a_slot(bits, dims, group, code_bytes, slot_bytes):
    slot = affine_slot(dims, bits, group)
    assert (slot.dims, slot.code_bytes, slot.slot_bytes) == (dims, code_bytes, slot_bytes)
    assert slot.meta_bytes == slot_bytes - code_bytes
    assert len(slot.segments) == (slot_bytes - code_bytes) // 4


@pytest.mark.parametrize("dims", [64, 80, 96, 128, 256])
def test_bytes_of_a_raw_slot(dims):
    slot = raw_slot(dims)
    assert (slot.code_bytes, slot.meta_bytes, slot.slot_bytes) == (2 * dims, 0, 2 * dims)


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


@st.composite
def slots(draw) -> SlotLayout:
    """Segments of any widths, raw ones among them."""
    segments, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        stop = start + 8 * draw(st.integers(1, 6))
        rule = draw(st.sampled_from(("affine", "affine", "raw")))
        segments.append(Segment(start, stop, draw(st.integers(1, 8)), rule))
        start = stop
    return SlotLayout(tuple(segments))


def page_layouts() -> st.SearchStrategy[PageLayout]:
    return st.builds(PageLayout, slots(), slots(), st.sampled_from((1, 2, 3, 7, 16, 64)))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(page_layouts(), st.integers(1, 3), st.integers(1, 3))
def test_arrays_of_a_page_are_disjoint_aligned_and_cover_it(layout, pages, heads):
    pool = layout.allocate(pages, heads)
    assert pool.shape == (pages, heads, layout.page_bytes)
    assert pool.dtype == torch.uint8
    pool.zero_()
    views = (*layout.key_views(pool), *layout.value_views(pool))
    slots = (layout.key, layout.key, layout.value, layout.value)
    for index, (view, slot) in enumerate(zip(views, slots, strict=True)):
        is_meta = index % 2
        width = slot.meta_bytes // 2 if is_meta else slot.code_bytes
        assert view.shape == (pages, heads, layout.page_size, width)
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
                size * layout.key.meta_bytes,
                size * layout.value.code_bytes,
                size * layout.value.meta_bytes,
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
    k_codes, k_meta = layout.key_views(page)
    v_codes, v_meta = layout.value_views(page)
    assert k_codes.tolist() == [list(range(12)), list(range(12, 24)), list(range(24, 36))]
    assert v_codes.tolist() == [list(range(48, 64)), list(range(64, 80)), list(range(80, 96))]
    assert k_meta.view(torch.uint8).tolist() == [list(range(start, start + 4)) for start in (96, 100, 104)]
    assert v_meta.view(torch.uint8).tolist() == [list(range(start, start + 4)) for start in (112, 116, 120)]


def test_views_alias_the_pool():
    layout = PageLayout(affine_slot(128, 4, 64), affine_slot(128, 2), 16)
    pool = layout.allocate(3, 2)
    pool.fill_(0xFF)
    codes, meta = layout.value_views(pool)
    codes[2, 1, 5] = 7
    meta[2, 1, 5] = 1.0
    changed = (pool != 0xFF).nonzero()
    assert changed[:, :2].unique(dim=0).tolist() == [[2, 1]]
    # V codes follow 16·64 bytes of K codes; V metadata follows 16·32 bytes of V codes and 16·8 of K metadata
    v_codes, v_meta = 1024 + 5 * 32, 1024 + 512 + 128 + 5 * 4
    assert changed[:, 2].tolist() == [*range(v_codes, v_codes + 32), *range(v_meta, v_meta + 4)]
    assert pool[2, 1, v_meta : v_meta + 4].tolist() == [0x00, 0x3C, 0x00, 0x3C]  # float16 1.0, little endian


def test_views_of_gathered_and_transposed_pages():
    layout = PageLayout(affine_slot(64, 4), affine_slot(64, 4), 4)
    pool = layout.allocate(5, 3).random_(generator=torch.Generator().manual_seed(0))
    table = torch.tensor([[4, 0], [2, 2]])
    gathered = pool[table].transpose(1, 2)  # [2, heads, 2, page_bytes]
    codes, meta = layout.key_views(gathered)
    assert codes.shape == (2, 3, 2, 4, 32)
    assert meta.shape == (2, 3, 2, 4, 2)
    for row in range(2):
        for i, page in enumerate(table[row].tolist()):
            for head in range(3):
                bytes_ = pool[page, head].tolist()
                for token in range(4):
                    assert codes[row, head, i, token].tolist() == bytes_[32 * token : 32 * token + 32]
                    found = meta[row, head, i, token].contiguous().view(torch.uint8).tolist()
                    assert found == bytes_[256 + 4 * token : 256 + 4 * token + 4]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(page_layouts(), st.booleans())
def test_sides_are_the_same_bytes_as_keys_and_values(layout, alike):
    if alike:
        layout = PageLayout(layout.key, layout.key, layout.page_size)
    pool = layout.allocate(3, 2).random_(generator=torch.Generator().manual_seed(1))
    views = (layout.key_views(pool), layout.value_views(pool))
    parts = layout.sides(pool)
    assert [side for sides, _, _ in parts for side in range(2)[sides]] == [0, 1]
    assert len(parts) == (1 if layout.key == layout.value else 2)
    for sides, codes, meta in parts:
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
        codes, meta = layout.key_views(layout.allocate(0, 2))
        assert codes.shape == (0, 2, 16, slot.code_bytes)
        assert meta.shape == (0, 2, 16, slot.meta_bytes // 2)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(slots())
def test_split_gives_each_segment_its_codes_and_metadata(slot):
    codes = torch.arange(slot.code_bytes).expand(2, -1)
    meta = torch.arange(slot.meta_bytes // 2).expand(2, -1)
    code, entry = 0, 0
    parts = slot.split(codes, meta)
    assert [segment for segment, _, _ in parts] == list(slot.segments)
    for segment, part_codes, part_meta in parts:
        n = 2 * segment.dims if segment.rule == "raw" else segment.dims * segment.bits // 8
        entries = 0 if segment.rule == "raw" else 2
        assert part_codes[1].tolist() == list(range(code, code + n))
        assert part_meta[1].tolist() == list(range(entry, entry + entries))
        code, entry = code + n, entry + entries
    assert (code, 2 * entry) == (slot.code_bytes, slot.meta_bytes)


@pytest.mark.parametrize(("dims", "group"), [(128, 48), (64, 128), (80, 64), (64, 0), (64, -32)])
def test_groups_that_do_not_divide_are_refused(dims, group):
    with pytest.raises(ValueError, match=f"group={group} does not divide the head dimension {dims}"):
        affine_slot(dims, 4, group)


def test_groups_that_leave_bits_over_are_refused():
    with pytest.raises(ValueError, match="2 codes of 2 bits do not fill whole bytes"):
        affine_slot(64, 2, 2)


@pytest.mark.parametrize("bits", [0, 9, 16])
def test_widths_outside_1_to_8_are_refused(bits):
    with pytest.raises(ValueError, match=f"1 to 8 bits, not {bits}"):
        affine_slot(64, bits)


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


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_without_tokens_is_refused(page_size):
    with pytest.raises(ValueError, match=f"at least one token, not {page_size}"):
        PageLayout(raw_slot(64), raw_slot(64), page_size)
