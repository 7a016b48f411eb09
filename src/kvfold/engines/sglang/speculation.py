"""Speculative decoding: which drafts packed pages can take, and how drafts of a tree become a chain."""

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.format.open_block import DRAFTED

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.server_args import ServerArgs

    from kvfold.engines.serving import Plan

Array = np.ndarray[Any, Any]
MODELS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")  # algorithms with a draft model


def refuse_drafts(arguments: "ServerArgs", plan: "Plan", attention_groups: int) -> None:
    """Refuse drafts that cannot be checked over packed pages, or are not tested there."""
    if arguments.speculative_algorithm is None:
        return
    algorithm = arguments.speculative_algorithm.upper()
    ngram = algorithm == "NGRAM"
    breadth = "speculative_ngram_max_bfs_breadth" if ngram else "speculative_eagle_topk"
    # of a request in a step: one token and its drafts
    tokens = arguments.speculative_num_draft_tokens or 1 if ngram else 1 + (arguments.speculative_num_steps or 0)
    others = {layer.kind for layer in plan.geometry.layers} - {"full"}
    reasons = {
        f"--speculative-algorithm {algorithm} is not tested yet: use NGRAM, {', '.join(MODELS)}": (
            not ngram and algorithm not in MODELS
        ),
        f"packed pages are read causally, and drafts of {algorithm} may form a tree: add "
        f"--{breadth.replace('_', '-')} 1": getattr(arguments, breadth) != 1,
        f"a step of {tokens} tokens is more than the {DRAFTED} that an open block can take back: draft fewer tokens": (
            plan.block > 0 and tokens > DRAFTED
        ),
        # a turn of a session may go on before more tokens than DRAFTED, which a step and the next one wrote
        "speculative decoding with streaming sessions and an open block is not tested yet: leave one of them out": (
            plan.block > 0 and getattr(arguments, "enable_streaming_session", False)
        ),
        f"speculative decoding beside {' and '.join(sorted(others))} layers is not tested yet: leave it out": (
            bool(others)
        ),
        "speculative decoding in a pipeline is not tested yet: leave out one of the two": arguments.pp_size > 1,
        "speculative decoding with data-parallel attention is not tested yet: leave out one of the two": (
            attention_groups > 1
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(reason)


def draft_layers(configurator: "KVCacheConfigurator") -> int:
    """How many layers of a draft model share the memory for the cache."""
    algorithm = configurator.spec_algorithm
    if configurator.is_draft_worker or not (algorithm.is_eagle() or algorithm.is_standalone()):
        return 0
    return int(configurator.spec_aux_config.eagle_draft_num_layers or 0)


def chains(drafts: tuple[Array, Array], corpus: Any, *_: Any, **__: Any) -> tuple[Array, Array]:
    """The longest path of each tree of drafts, as a chain.

    SGLang gives tokens [requests · n] and masks [requests · n · n]: in row i, the token i and those before it on its
    path. The first token is the last one of the answer so far. Even with a breadth of 1, matches of several lengths may
    begin with several tokens, and padding begins there too. A chain is padded at its end, by the token 0.
    """
    tokens, masks = drafts
    n = corpus.draft_token_num
    trees, paths = tokens.reshape(-1, n), masks.reshape(-1, n, n) != 0
    chained = np.zeros_like(trees)
    for chain, tree, path in zip(chained, trees, paths, strict=True):
        longest = path[path.sum(axis=1).argmax()]
        chain[: longest.sum()] = tree[longest]
    causal = np.tril(np.ones((n, n), masks.dtype))
    return chained.reshape(tokens.shape), np.broadcast_to(causal, paths.shape).reshape(masks.shape)
