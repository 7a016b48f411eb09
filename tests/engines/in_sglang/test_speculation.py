"""Speculative decoding in SGLang: which drafts are refused, how trees become chains, and what is left of drafts."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from defined_attention import defined_attention
from recorded_graphs import KERNELS, recorder
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_plugin import MODEL, PAGE, PAGES, Requests, backend, reading, tokens

from kvfold.engines.serving import Config, Plan
from kvfold.engines.sglang.attention import PackedBackend
from kvfold.engines.sglang.speculation import chains, refuse_drafts
from kvfold.engines.window_memory import shadows_needed
from kvfold.ops.restore import Restore
from kvfold.recipes import parse

N = 4  # tokens of a request in a step: one and its drafts
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_num_draft_tokens": None,
    "page_size": PAGE,
    "pp_size": 1,
}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": 15}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (EAGLE | {"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH is not tested yet: use NGRAM"),
        ({"speculative_ngram_max_bfs_breadth": 10}, "form a tree: add --speculative-ngram-max-bfs-breadth 1"),
        (EAGLE | {"speculative_eagle_topk": None}, "form a tree: add --speculative-eagle-topk 1"),
        ({"speculative_num_draft_tokens": 17}, "a page of 16 tokens is smaller than a step of 17"),
        (EAGLE | {"speculative_num_steps": 16}, "a page of 16 tokens is smaller than a step of 17"),
        ({"pp_size": 2}, "speculative decoding in a pipeline is not tested yet"),
    ],
)
def test_drafts_that_are_refused(arguments, reason):
    plan = Plan.make(Config(parse("int4:centre=false")), MODEL, PAGE, torch.bfloat16)
    for allowed in ({"speculative_num_draft_tokens": 16}, EAGLE):
        refuse_drafts(SimpleNamespace(**NGRAM | allowed), plan, 1)
    with pytest.raises(ValueError, match=reason):
        refuse_drafts(SimpleNamespace(**NGRAM | arguments), plan, 1)
    with pytest.raises(ValueError, match="with data-parallel attention is not tested yet"):
        refuse_drafts(SimpleNamespace(**NGRAM), plan, 2)


def test_drafts_beside_other_layers_are_refused():
    layers = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, "sliding_window": 64}
    plan = Plan.make(Config(parse("int4:centre=false")), MODEL | layers, PAGE, torch.bfloat16)
    with pytest.raises(ValueError, match="speculative decoding beside sliding layers is not tested yet"):
        refuse_drafts(SimpleNamespace(**NGRAM), plan, 1)


@pytest.mark.parametrize("n", range(1, 6))
def test_the_longest_path_of_a_tree_becomes_a_chain(n):
    """Of every tree of n tokens, against all its paths. Token i is 7 + i."""
    trees = list(product(*(range(i) for i in range(1, n))))  # the parent of each token but the first
    masks, paths = np.zeros((len(trees), n, n), np.int64), []
    for mask, parents in zip(masks, trees, strict=True):
        mask[0, 0] = 1
        for i, parent in enumerate(parents, 1):
            mask[i] = mask[parent]
            mask[i, i] = 1
        paths.append([[7 + j for j in range(n) if path[j]] for path in mask])
    drafts = np.tile(7 + np.arange(n), len(trees)), masks.flatten()
    chained, causal = chains(drafts, SimpleNamespace(draft_token_num=n))
    assert causal.tolist() == len(trees) * [j <= i for i in range(n) for j in range(n)]
    for own, chain in zip(paths, chained.reshape(-1, n).tolist(), strict=True):
        longest = max(map(len, own))
        assert chain[:longest] in own
        assert not any(chain[longest:])


class Drafting(Requests):
    """Two requests with drafts, and `padding` rows for a CUDA graph."""

    def __init__(self, backend: PackedBackend, lengths: list[int], padding: int = 0) -> None:
        super().__init__(backend, lengths)
        self.rows = torch.tensor([1, 2, *[0] * padding])
        self.before = torch.ones_like(self.rows)
        self.slots = torch.zeros(N * len(self.rows), dtype=torch.int64)
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(self.rows),
            num_padding=padding,
            seq_lens=self.before,
            out_cache_loc=self.slots,
            req_pool_indices=self.rows,
        )
        self.taken_back = 0  # pages that a step began and of which nothing was accepted

    def draft(self) -> None:
        """One token of each request, and drafts."""
        for row, length in enumerate(self.lengths):
            self.before[row] = length
            self.slots[N * row : N * row + N] = self.backend.req_to_token[1 + row, length : length + N]

    def accept(self, counts: list[int]) -> None:
        for row, count in enumerate(counts):
            before, after = self.lengths[row], self.lengths[row] + count
            self.taken_back += (before + N - 1) // PAGE > (after - 1) // PAGE
            self.lengths[row] = after


def drawn(generator: torch.Generator) -> list[int]:
    return torch.randint(1, N + 1, (2,), generator=generator).tolist()


@pytest.mark.parametrize("recent", [0, 3, 20, 256])
def test_rejected_drafts_leave_no_trace(recent):
    """Every query reads what the definition says, over the ends of pages. Between steps with drafts, a third request
    comes and goes, so that two rest; their windows lose no page."""
    recipe, generator = f"int4:centre=false,sink=4,recent={recent}", torch.Generator().manual_seed(recent)
    shadows = shadows_needed(parse(recipe).windows, PAGE, requests=3, tokens=4 * PAGE)
    requests = Drafting(backend(recipe, shadows=shadows), [37, 13])
    pool = requests.backend.req_to_token_pool
    own = set((requests.backend.req_to_token[1:3] // PAGE).flatten().tolist())
    free = torch.tensor(sorted(set(range(1, 1 + PAGES)) - own))
    with defined_attention() as found:
        requests.extend(*(x.float() for x in tokens(37 + 13, generator)))
        for step in range(20):
            requests.draft()
            requests.backend.init_forward_metadata(requests.batch)
            requests.backend.forward_extend(
                *(x.float() for x in tokens(2 * N, generator)), requests.layer, requests.batch
            )
            requests.accept(drawn(generator))
            if step % 3 == 0:
                pool.free_slots = []
                pages = free.roll(step)[:4]
                pool.req_to_token[3, : 4 * PAGE] = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
                prompt = reading(requests.backend, [3], [0], [4 * PAGE])
                requests.backend.init_forward_metadata(prompt)
                requests.backend.forward_extend(
                    *(x.float() for x in tokens(4 * PAGE, generator)), requests.layer, prompt
                )
                pool.free_slots = [3]
    assert requests.taken_back > 0
    assert found.queries == 37 + 13 + 20 * 2 * N + 7 * 4 * PAGE
    assert found.restored == 0
    assert found.error < 1e-5


@pytest.mark.usefixtures("_poisoned_memory")
def test_a_captured_step_checks_drafts(monkeypatch):
    """Against the same requests without kernels and without a graph, over the ends of pages."""
    recipe, generator = "int4:centre=false,sink=4,recent=20", torch.Generator().manual_seed(0)
    plain = Drafting(backend(recipe), [37, 13])
    monkeypatch.setattr("kvfold.engines.serving.choose", lambda *_, **__: KERNELS)
    monkeypatch.setattr(Restore, "__call__", Restore.launch)
    own = Drafting(backend(recipe), [37, 13], padding=1)
    static = tokens(3 * N, generator)
    static[0] = static[0].flatten(1)
    own.backend.init_cuda_graph_state(4, 4 * N)

    def begin() -> None:
        own.before.fill_(1)  # all of it padding
        own.backend.init_forward_metadata_out_graph(own.batch, in_capture=True)

    def verify() -> torch.Tensor:
        """What SGLang captures of a step."""
        own.backend.init_forward_metadata_in_graph(own.batch)
        return own.backend.forward_extend(*static, own.layer, own.batch)

    graph, out = recorder(monkeypatch)(begin, verify)
    first = tokens(37 + 13, generator)
    torch.testing.assert_close(own.extend(*first), plain.extend(*first), atol=2e-2, rtol=0)
    for _ in range(6):
        new = tokens(2 * N, generator)
        for target, x in zip(static, new, strict=True):
            target[: 2 * N].copy_(x.view(2 * N, *target.shape[1:]))
        for requests in (own, plain):
            requests.draft()
        own.backend.init_forward_metadata_out_graph(own.batch)
        graph.replay()
        plain.backend.init_forward_metadata(plain.batch)
        expected = plain.backend.forward_extend(*new, plain.layer, plain.batch)
        torch.testing.assert_close(out[: 2 * N], expected, atol=2e-2, rtol=0)
        assert torch.equal(own.backend.lengths[:, 1:3], plain.backend.lengths[:, 1:3])
        accepted = drawn(generator)
        for requests in (own, plain):
            requests.accept(accepted)
    assert own.taken_back > 0
    assert torch.equal(own.backend.served.shadow_table.of, plain.backend.served.shadow_table.of)
