"""How many shadow pages the windows of running requests need, and how many requests a memory carries. Imports no torch.

Engines set shadow pages aside at start, for all requests that may run at once.
"""

from bisect import bisect_right
from collections.abc import Callable

from kvfold.format.windows import Windows

SHARE = 4  # unless the user says how many requests run, windows take a quarter of the cache's memory at most


def most_pages(tokens: int, page_size: int) -> int:
    """How many pages `tokens` successive tokens can lie in, at most."""
    return 0 if tokens <= 0 else 1 + -(-(tokens - 1) // page_size)


def shadows_needed(windows: Windows, page_size: int, requests: int, tokens: int) -> int:
    """How many shadows a step of `tokens` tokens needs at once, at most, while `requests` requests run.

    - Every running request needs the pages of its sink and of its recent window, also if it sits the step out.
    - The step begins at most one page per request and one per `page_size` tokens. Per request, the recent window
      reaches into at most as many of them as it has pages.
    - A request that sits the step out may have begun one page with tokens that were taken back.
    """
    sink, recent = -(-windows.sink // page_size), most_pages(windows.recent - 1, page_size)
    begun = min(requests + tokens // page_size, requests * recent)
    return requests * (sink + recent) + begun


def carried(most: int, memory: int, taken: Callable[[int], int]) -> int:
    """How many requests may run at once, of `most`, so that their windows take no more than their share of `memory`.
    At least one. `taken` says how many bytes the windows of so many requests take."""
    return max(1, bisect_right(range(1, most + 1), memory // SHARE, key=taken))


def check_left(memory: int, taken: int, requests: int) -> None:
    """Refuse windows that leave no memory for the cache."""
    if taken >= memory:
        raise ValueError(
            f"kvfold: the windows of --max-num-seqs {requests} requests take {taken / 2**30:.1f} GiB and leave nothing "
            f"of about {memory / 2**30:.1f} GiB for the cache: lower --max-num-seqs, or raise --kv-cache-memory-bytes"
        )
