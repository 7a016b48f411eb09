"""`kvfold bench soak` against a server in the test."""

import asyncio
import csv
import json
from dataclasses import replace
from typing import Any

import fake_server
import pytest
from fake_server import FIRST, NEXT, FakeServer, running
from typer.testing import CliRunner

from kvfold.bench import soak
from kvfold.bench.client import Server, ServerError
from kvfold.bench.soak import MOST_LOST, Row, Soak
from kvfold.cli import app

SHORT = Soak(users=4, seconds=60, requests=60, longest=64, output=6, leaving=25)


def run(fake: FakeServer, load: Soak) -> tuple[Row, list[str]]:
    return soak.run(Server.find(fake.url, None), load, "int4", "a GPU")


def test_every_request_is_answered_or_left():
    with running(metrics='sglang:num_used_tokens{model="a"} 0.0\n') as fake:
        row, lost = run(fake, SHORT)
    assert lost == []
    assert row.requests == 60 == row.answered + row.left
    assert row.answered <= len(fake.prompts) <= 60, "who leaves at once may send nothing"
    assert 0 < row.left < row.answered
    assert FIRST <= row.ttft_p50 <= row.ttft_p99
    assert 2 * NEXT <= row.gap_p99 <= row.gap_p999
    assert row.kv_tokens_left == 0
    assert (row.engine, row.recipe, row.gpu, row.users) == ("vllm", "int4", "a GPU", 4)


def test_lengths_differ_and_some_prompts_begin_alike():
    with running() as fake:
        run(fake, SHORT)
    prompts, answers = [body["prompt"] for body in fake.prompts], {body["max_tokens"] for body in fake.prompts}
    lengths = {len(prompt) for prompt in prompts}
    assert min(lengths) >= 8
    assert 32 < max(lengths) <= 64
    assert len(lengths) > 15
    assert answers == set(range(1, 7))
    beginnings = [tuple(prompt[:4]) for prompt in prompts]
    again = sum(beginnings.count(beginning) > 1 for beginning in beginnings)
    assert 10 < again < 50


def test_it_ends_in_time():
    with running() as fake:
        row, _ = run(fake, replace(SHORT, seconds=0.5, requests=None))
    assert row.seconds >= 0.5
    assert row.requests >= len(fake.prompts) > 0


def test_a_server_that_answers_nothing_ends_it():
    with running(missing=1) as fake, pytest.raises(ServerError, match=r"answered none of .* tokens of"):
        run(fake, replace(SHORT, requests=None, leaving=0))
    assert MOST_LOST <= len(fake.prompts) < MOST_LOST + SHORT.users
    assert max(fake.together) <= SHORT.users


def test_the_command_fails_if_an_answer_is_lost(monkeypatch, tmp_path):
    complete = FakeServer.complete

    async def fifth_is_cut(fake: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        fake.missing = int(len(fake.prompts) == 4)
        await complete(fake, body, writer)

    monkeypatch.setattr(fake_server.FakeServer, "complete", fifth_is_cut)
    table, rows = tmp_path / "rows.csv", tmp_path / "rows.json"
    with running() as fake:
        options = ("--users", "1", "--requests", "8", "--longest", "16", "--output", "4", "--leaving", "0")
        files = ("--csv", str(table), "--json", str(rows))
        result = CliRunner().invoke(app, ["bench", "soak", fake.url, "-r", "int4", *options, *files])
    assert result.exit_code == 1
    assert "8: 7 answered, 0 users left, 1 lost" in result.output
    assert "1 answers were lost, the first because: " in " ".join(result.output.split())
    (row,) = json.loads(rows.read_text())
    assert (row["requests"], row["lost"], row["memory_end_mib"]) == (8, 1, None)
    assert table.read_text().count("\n") == 2


def test_a_second_server_adds_its_row(tmp_path):
    table, other = tmp_path / "rows.csv", tmp_path / "others.csv"
    options = ("--users", "1", "--requests", "2", "--longest", "16", "--output", "4", "--leaving", "0")
    with running() as fake:
        for recipe in ("bf16", "int4"):
            command = ["bench", "soak", fake.url, "-r", recipe, *options, "--csv"]
            assert CliRunner().invoke(app, [*command, str(table)]).exit_code == 0
        other.write_text("users,seconds\n")
        asked = len(fake.prompts)
        result = CliRunner().invoke(app, [*command, str(other)])
    with table.open() as file:
        assert [row["recipe"] for row in csv.DictReader(file)] == ["bf16", "int4"]
    assert "has other columns than the rows to be added" in str(result.exception)
    assert len(fake.prompts) == asked
    assert other.read_text() == "users,seconds\n"
