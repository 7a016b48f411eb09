"""Kernels of speculative decoding in plain PyTorch, one request after the other."""

import torch
from torch import Tensor


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    requests: int,
    n: int,
) -> None:
    """In row i, the mask has the token i and those before it on its path."""
    for row, paths in enumerate(mask.view(requests, n, n).tolist()):
        parents = [max((j for j in range(i) if path[j]), default=-1) for i, path in enumerate(paths)]
        for i, path in enumerate(paths):
            positions[row * n + i] = lengths[row] + sum(path[:i])
            index[row, i] = row * n + i
            next_token[row, i] = min((j for j in range(n) if parents[j] == i), default=-1)
            siblings = (j for j in range(i + 1, n) if parents[j] == parents[i] >= 0)
            next_sibling[row, i] = min(siblings, default=-1)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the drafts from the first token on, as long as they are what the model predicts."""
    for row, drafts in enumerate(candidates.tolist()):
        node, accepted = 0, 0
        while True:
            predicted = target_predict[row, node]
            accept_index[row, accepted] = retrive_index[row, node]
            predicts[retrive_index[row, node]] = predicted
            child = int(retrive_next_token[row, node])
            while child >= 0 and drafts[child] != predicted:
                child = int(retrive_next_sibling[row, child])
            if child < 0 or accepted + 1 == accept_index.shape[1]:
                break
            node, accepted = child, accepted + 1
        accept_token_num[row] = accepted


def assign_extend_cache_locs_cpu(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _: int
) -> None:
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    place = 0
    for row, start, end in spans:
        out[place : place + end - start] = req_to_token[row, start:end]
        place += end - start


def fill_accept_out_cache_loc_cpu(accepted: Tensor, locations: Tensor, out: Tensor) -> None:
    """The locations of accepted tokens, one after the other. Others are -1."""
    indices = accepted[accepted >= 0].long()
    out[: len(indices)] = locations[indices]


def assign_req_to_token_pool_cpu(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, _: int
) -> None:
    place = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = locations[place : place + end - start]
        place += end - start


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    steps: int,
    n: int,
    mode: int,
) -> None:
    """Of one draft after the other: a chain."""
    assert topk == 1
    rows, requests = torch.arange(n), len(lengths)
    mask.view(requests, n, n).copy_(rows <= rows.unsqueeze(1))
    positions.view(requests, n).copy_(lengths.unsqueeze(1) + rows)
    index.copy_(torch.arange(requests * n).view(requests, n))
    next_token.copy_(torch.where(rows + 1 < n, rows + 1, -1))
    next_sibling.fill_(-1)


def fill_bonus_tokens_cpu(accepted: Tensor, counts: Tensor, out: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    for row, count in enumerate(counts.tolist()):
        out[row] = accepted.flatten()[row * stride + count - 1]


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, req_to_token: Tensor, lengths: Tensor, out: Tensor, width: int, topk: int, steps: int
) -> None:
    ends = lengths + topk * steps
    assign_extend_cache_locs_cpu(rows, req_to_token, lengths, ends, out, width)


def copy_all_layer_kv_cache_cpu(*_: object) -> None:
    """Nothing moves: accepted drafts of a chain lie where they belong."""
