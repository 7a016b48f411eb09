"""Speculative decoding in SGLang: which drafts are refused, how trees become chains, and what is left of drafts."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from defined_attention import defined_attention
from recorded_graphs import KERNELS, recorder
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_plugin import MODEL, PAGE, PAGES, Requests, backend, bytes_of_rings, reading, tokens

from kvfold.engines.serving import Config, Plan
from kvfold.engines.sglang.attention import PackedBackend
from kvfold.engines.sglang.speculation import chains, refuse_drafts
from kvfold.format.open_block import DRAFTED
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
        ({"speculative_num_draft_tokens": 17}, "17 tokens is more than the 16 that an open block can take back"),
        (EAGLE | {"speculative_num_steps": 16}, "17 tokens is more than the 16 that an open block can take back"),
        ({"enable_streaming_session": True}, "with streaming sessions and an open block is not tested yet"),
        ({"pp_size": 2}, "speculative decoding in a pipeline is not tested yet"),
    ],
)
def test_drafts_that_are_refused(arguments, reason):
    plan = Plan.make(Config(parse("int4:centre=false,block=16")), MODEL, PAGE, torch.bfloat16)
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
    """Two requests with `n` tokens each in a step, one and its drafts, and `padding` rows for a CUDA graph."""

    def __init__(self, backend: PackedBackend, lengths: list[int], n: int = N, padding: int = 0) -> None:
        super().__init__(backend, lengths)
        self.n = n
        self.rows = torch.tensor([1, 2, *[0] * padding])
        self.before = torch.ones_like(self.rows)
        self.slots = torch.zeros(n * len(self.rows), dtype=torch.int64)
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
        n = self.n
        for row, length in enumerate(self.lengths):
            self.before[row] = length
            self.slots[n * row : n * row + n] = self.backend.req_to_token[1 + row, length : length + n]

    def accept(self, counts: list[int]) -> None:
        for row, count in enumerate(counts):
            before, after = self.lengths[row], self.lengths[row] + count
            self.taken_back += (before + self.n - 1) // PAGE > (after - 1) // PAGE
            self.lengths[row] = after


def drawn(generator: torch.Generator) -> list[int]:
    return torch.randint(1, N + 1, (2,), generator=generator).tolist()


@pytest.mark.parametrize(("block", "n"), [(0, N), (8, N), (16, N), (16, DRAFTED)])
@pytest.mark.usefixtures("_poisoned_memory")
def test_rejected_drafts_leave_no_trace(block, n):
    """Every query reads what the definition says, over the borders of blocks and pages. Between steps with drafts, a
    third request comes and goes. Its second chunk begins inside a block, and its ring holds what another one left."""
    generator, steps = torch.Generator().manual_seed(block), 18
    requests = Drafting(backend(f"int4:centre=false,block={block}"), [37, 13], n)
    table = requests.backend.req_to_token
    free = torch.tensor(sorted(set(range(1, 1 + PAGES)) - set((table[1:3] // PAGE).flatten().tolist())))
    with defined_attention() as found:
        requests.extend(*drawn_tokens(37 + 13, generator))
        for step in range(steps):
            requests.draft()
            requests.backend.init_forward_metadata(requests.batch)
            requests.backend.forward_extend(*drawn_tokens(2 * n, generator), requests.layer, requests.batch)
            requests.accept(drawn(generator))
            if step % 3 == 0:
                table[3, : 4 * PAGE] = (free.roll(step)[:4].unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
                for start, end in ((0, 45), (45, 4 * PAGE)):
                    prompt = reading(requests.backend, [3], [start], [end])
                    requests.backend.init_forward_metadata(prompt)
                    requests.backend.forward_extend(*drawn_tokens(end - start, generator), requests.layer, prompt)
    assert requests.taken_back > 0
    assert found.queries == 37 + 13 + steps * 2 * n + steps // 3 * 4 * PAGE
    assert found.error < 1e-5


def drawn_tokens(n: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [x.float() for x in tokens(n, generator)]


@pytest.mark.usefixtures("_poisoned_memory")
def test_a_captured_step_checks_drafts(monkeypatch):
    """Against the same requests without kernels and without a graph, over the ends of pages."""
    recipe, generator = "int4:centre=false,block=16", torch.Generator().manual_seed(0)
    plain = Drafting(backend(recipe), [37, 13])
    monkeypatch.setattr("kvfold.engines.serving.choose", lambda *_, **__: KERNELS)
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
        accepted = drawn(generator)
        for requests in (own, plain):
            requests.accept(accepted)
    assert own.taken_back > 0
    assert torch.equal(bytes_of_rings(own.backend)[1:3], bytes_of_rings(plain.backend)[1:3])
