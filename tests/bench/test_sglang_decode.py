"""What `benchmarks/sglang_decode.py` reports of the times at which tokens came; SGLang itself is not needed."""

import runpy
import sys
from pathlib import Path

import pytest

OUTPUT = 100


@pytest.fixture(scope="module")
def together():
    script = Path(__file__).parents[2] / "benchmarks" / "sglang_decode.py"
    sys.path.insert(0, str(script.parent))
    yield runpy.run_path(str(script))["together"]
    sys.path.remove(str(script.parent))


def request(first: float, *steps: float) -> list[tuple[float, int]]:
    """Its first token comes at `first`, each other one so many seconds after the last."""
    moments = [first]
    for step in steps:
        moments.append(moments[-1] + step)
    return [(moment, number) for number, moment in enumerate(moments, 1)]


def test_decoding_is_timed_while_all_requests_decode(together):
    """The first has 11 tokens by the time the second has one; then both get a token every half second."""
    early = request(0, *[1] * 10, *[0.5] * 89)
    late = request(10, *[0.5] * 99)
    assert together([early, late], OUTPUT) == (10, 44.5, 2 * 89)


def test_a_request_that_waits_for_others_to_end_is_refused(together):
    """As SGLang does with the last prompt where it takes no more requests at a time."""
    first, waiting = request(0, *[1] * 99), request(99.5, *[1] * 99)
    with pytest.raises(ValueError, match=r"2 requests were not decoded together: .* another had 100 of 100 tokens"):
        together([first, waiting], OUTPUT)


def test_a_request_that_comes_in_the_second_half_is_refused(together):
    first, waiting = request(0, *[1] * 99), request(60.5, *[1] * 99)
    with pytest.raises(ValueError, match="another had 61 of 100 tokens"):
        together([first, waiting], OUTPUT)
