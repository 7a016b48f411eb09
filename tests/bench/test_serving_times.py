"""`kvfold bench serving` against a server in the test that answers after known delays."""

import csv
import json
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from fake_server import FIRST, NEXT, FakeServer, running
from typer.testing import CliRunner, Result

from kvfold.bench import serving_times
from kvfold.bench.serving_times import (
    WARM_UP,
    WARM_UP_INPUT,
    WARM_UP_OUTPUT,
    Answer,
    Load,
    Row,
    Server,
    ServerError,
    row,
)
from kvfold.cli import app


def measure(fake: FakeServer, *loads: Load) -> list[Row]:
    return list(serving_times.run(Server.find(fake.url, None), loads, "int4", "a GPU"))


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "serving", *map(str, arguments)])


# Numbers


def test_times_and_rates_are_those_of_the_server():
    with running() as fake:
        (found,) = measure(fake, Load(input=20, output=10, concurrency=3, prefix_hit=0, rounds=2))
    whole = FIRST + 4 * 2 * NEXT  # five events of two tokens
    assert found.requests == 6
    # A busy machine may be slower than the server, never faster
    assert FIRST <= found.ttft_p50 < found.e2e_p50
    assert whole <= found.e2e_p50
    assert 0 < found.system_tps <= 60 / (2 * whole)
    assert 0 < found.request_tps <= 1.01 * 9 / (whole - FIRST)
    assert (found.engine, found.version, found.model, found.recipe, found.gpu) == (
        *("vllm", "1.2.3", "tiny", "int4", "a GPU"),
    )


def test_percentiles_are_numpys():
    rng = np.random.default_rng(0)
    answers = [Answer(first, first + rest) for first, rest in rng.uniform(0.1, 2, (40, 2))]
    found = row(Server("", "m", "e", "v"), Load(8, 5, 4, 0, 10), answers, 8.0, 7, "int4", "gpu")
    for p in (50, 90, 99):
        assert getattr(found, f"ttft_p{p}") == pytest.approx(np.percentile([a.ttft for a in answers], p), abs=1e-4)
        assert getattr(found, f"e2e_p{p}") == pytest.approx(np.percentile([a.e2e for a in answers], p), abs=1e-4)
    assert found.system_tps == 40 * 5 / 8
    rates = sorted(4 / (a.e2e - a.ttft) for a in answers)
    assert found.request_tps == pytest.approx((rates[19] + rates[20]) / 2, abs=0.01)
    assert found.kv_tokens == 7


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        ('# HELP sglang:num_used_tokens x\nsglang:num_used_tokens{model="a",tp_rank="0"} 640.0\n', 640),
        (
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n',
            400,
        ),
        ("something_else 3\n", None),
        (None, None),
    ],
)
def test_peak_of_the_cache_comes_from_the_servers_metrics(metrics: str | None, tokens: int | None):
    with running(metrics=metrics) as fake:
        (found,) = measure(fake, Load(input=4, output=2, concurrency=1, prefix_hit=0, rounds=1))
    assert found.kv_tokens == tokens


# What is sent


def common_prefix(prompts: list[list[int]]) -> list[int]:
    return [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=True))]


@pytest.mark.parametrize("users", [1, 4, 130])
def test_as_many_requests_run_as_there_are_users_and_never_more(users: int):
    with running() as fake:
        measure(fake, Load(input=4, output=4, concurrency=users, prefix_hit=0, rounds=3))
    assert len(fake.prompts) == users + WARM_UP + 3 * users
    assert max(fake.together[users + WARM_UP :]) == users


def test_users_come_together_before_they_are_timed():
    with running() as fake:
        measure(fake, Load(input=40, output=9, concurrency=3, prefix_hit=100, rounds=1))
    short, others = fake.prompts[:3], fake.prompts[3:]
    assert [len(body["prompt"]) for body in short] == [WARM_UP_INPUT] * 3
    assert fake.together[: 3 + WARM_UP] == [1, 2, 3] + [1] * WARM_UP
    assert common_prefix([body["prompt"] for body in (*short, others[0])]) == []
    assert [body["max_tokens"] for body in fake.prompts] == [WARM_UP_OUTPUT] * (3 + WARM_UP) + [9] * 3


@pytest.mark.parametrize("hit", [0, 50, 100])
def test_so_much_of_every_prompt_is_shared(hit: int):
    with running() as fake:
        measure(fake, *[Load(input=40, output=2, concurrency=2, prefix_hit=hit, rounds=2)] * 2)
    prompts = [body["prompt"] for body in fake.prompts]
    half = len(prompts) // 2
    for own in (prompts[2:half], prompts[half + 2 :]):  # of one load each, without the short ones before it
        common = common_prefix(own)
        assert len(common) == 40 * hit // 100
        assert all(len(prompt) == 40 for prompt in own)
        assert len({tuple(prompt[len(common) :]) for prompt in own}) == (1 if hit == 100 else len(own))
    assert common_prefix([prompts[2], prompts[-1]]) == []  # the second load finds nothing of the first


def test_events_may_be_long_and_hold_any_character():
    with running(text="\u2028\x85\x0c é" * 50_000) as fake:
        (found,) = measure(fake, Load(input=4, output=2, concurrency=2, prefix_hit=0, rounds=1))
    assert found.requests == 2


def test_answers_do_not_end_before_their_length():
    with running() as fake:
        measure(fake, Load(input=4, output=6, concurrency=1, prefix_hit=0, rounds=1))
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for body in fake.prompts)
    assert fake.prompts[-1]["max_tokens"] == 6


# Errors


def test_no_server():
    result = command("http://127.0.0.1:9")
    assert isinstance(result.exception, ServerError)
    assert "no server answers at http://127.0.0.1:9" in str(result.exception)


def test_no_openai_endpoint():
    with running(models=()) as fake, pytest.raises(ServerError, match="serves nothing: choose one with --model"):
        Server.find(fake.url, None)
    with running() as fake, pytest.raises(ServerError, match="is no OpenAI endpoint"):
        Server.find(f"{fake.url}/elsewhere", None)


def test_unknown_model():
    with running(models=("one", "two")) as fake:
        with pytest.raises(ServerError, match="does not serve three, it serves one, two"):
            Server.find(fake.url, "three")
        with pytest.raises(ServerError, match="serves one, two: choose one with --model"):
            Server.find(fake.url, None)
        assert Server.find(f"{fake.url}/v1/", "two").model == "two"


def test_fewer_tokens_than_asked():
    with running(missing=2) as fake, pytest.raises(ServerError, match=r"gave 2 tokens of 4 \(it finished for 'stop'\)"):
        measure(fake, Load(input=4, output=4, concurrency=1, prefix_hit=0, rounds=1))


@pytest.mark.parametrize("status", [400, 503])
def test_a_refused_request(status: int):
    refused = rf"/v1/completions refused a request: {status} Bad Request: .*context too long"
    with running(status=status) as fake, pytest.raises(ServerError, match=refused):
        measure(fake, Load(input=4, output=4, concurrency=1, prefix_hit=0, rounds=1))


@pytest.mark.parametrize("breaks", ["early", "late"])
def test_an_answer_that_breaks_off(breaks: str):
    with running(breaks=breaks) as fake, pytest.raises(ServerError, match="broke off an answer"):
        measure(fake, Load(input=4, output=4, concurrency=2, prefix_hit=0, rounds=1))


def test_a_request_that_the_server_gives_up():
    with running(gives_up=True) as fake, pytest.raises(ServerError, match=r"gave up on a request: .*out of memory"):
        measure(fake, Load(input=4, output=4, concurrency=1, prefix_hit=0, rounds=1))


def test_a_server_that_is_gone():
    with running() as fake:
        server = Server.find(fake.url, None)
    with pytest.raises(ServerError, match=f"no server answers at {fake.url}: .*Connect call failed"):
        list(serving_times.run(server, [Load(4, 4, 1, 0, 1)], "int4", "a GPU"))


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_times, "WAIT", 0.2)
    with running(silent=True) as fake, pytest.raises(ServerError, match=f"no server answers at {fake.url}: timed out"):
        Server.find(fake.url, None)


# The command


def test_command(tmp_path: Path):
    with running(version_path="/get_server_info") as fake:
        table = tmp_path / "rows.csv"
        arguments = (
            "--input",
            8,
            "--output",
            4,
            "-c",
            1,
            "-c",
            2,
            "--prefix-hit",
            0,
            "--prefix-hit",
            50,
            "--rounds",
            1,
        )
        result = command(fake.url, *arguments, "-r", "saw-int4", "--gpu", "H200", "--csv", table)
        more = command(fake.url, "--input", 8, "--output", 4, "-c", 3, "--rounds", 1, "--gpu", "H200", "--csv", table)
    assert result.exit_code == more.exit_code == 0, result.output + more.output
    assert "8 + 4 tokens, 50 % of prompts shared" in result.output
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["prefix_hit"], row["concurrency"]) for row in rows] == [
        ("0", "1"),
        ("0", "2"),
        ("50", "1"),
        ("50", "2"),
        ("0", "3"),  # of another server, whose row is added
    ]
    served = {(row["engine"], row["recipe"], row["gpu"]) for row in rows}
    assert served == {("sglang", "saw-int4", "H200"), ("sglang", "bf16", "H200")}


def test_json_takes_the_place_of_the_table():
    with running() as fake:
        result = command(fake.url, "--input", 8, "--output", 4, "-c", 2, "--rounds", 1, "--json", "-")
    (found,) = json.loads(result.stdout)
    assert found["requests"] == 2
    assert found["kv_tokens"] is None
