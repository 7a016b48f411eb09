"""The client of endpoints, against a server in the test that answers after known delays."""

import asyncio

import pytest
from fake_server import FIRST, NEXT, FakeServer, running

from kvfold.bench import client
from kvfold.bench.client import Answer, Server, ServerError


def ask(fake: FakeServer, prompt: int = 4, output: int = 4, server: Server | None = None) -> Answer:
    async def asked() -> Answer:
        async with client.client_session() as session:
            return await client.request(session, server or Server.find(fake.url, None), [7] * prompt, output)

    return asyncio.run(asked())


def test_times_are_those_of_the_server():
    with running() as fake:
        found, server = ask(fake, 20, 10), Server.find(fake.url, None)
    # a busy machine may be slower than the server, never faster
    assert FIRST <= found.ttft < found.e2e
    assert found.e2e >= FIRST + 4 * 2 * NEXT  # five events of two tokens
    assert sum(found.gaps) == pytest.approx(found.e2e - found.ttft, rel=0.5)
    assert (len(found.gaps), found.tokens) == (4, 10)
    assert (server.engine, server.version, server.model) == ("vllm", "1.2.3", "tiny")


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
def test_what_the_cache_holds_comes_from_the_servers_metrics(metrics: str | None, tokens: int | None):
    with running(metrics=metrics) as fake:
        assert Server.find(fake.url, None).kv_tokens() == tokens


def test_events_may_be_long_and_hold_any_character():
    with running(text="\u2028\x85\x0c é" * 50_000) as fake:
        assert ask(fake, output=2).tokens == 2


def test_answers_do_not_end_before_their_length():
    with running() as fake:
        ask(fake, output=6)
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for body in fake.prompts)
    assert fake.prompts[-1]["max_tokens"] == 6


# Errors


def test_no_server():
    with pytest.raises(ServerError, match=r"no server answers at http://127\.0\.0\.1:9"):
        Server.find("http://127.0.0.1:9", None)


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
        ask(fake)


@pytest.mark.parametrize("status", [400, 503])
def test_a_refused_request(status: int):
    refused = rf"/v1/completions refused a request: {status} Bad Request: .*context too long"
    with running(status=status) as fake, pytest.raises(ServerError, match=refused):
        ask(fake)


@pytest.mark.parametrize("breaks", ["early", "late"])
def test_an_answer_that_breaks_off(breaks: str):
    with running(breaks=breaks) as fake, pytest.raises(ServerError, match="broke off an answer"):
        ask(fake)


def test_a_request_that_the_server_gives_up():
    with running(gives_up=True) as fake, pytest.raises(ServerError, match=r"gave up on a request: .*out of memory"):
        ask(fake)


def test_a_server_that_is_gone():
    with running() as fake:
        server = Server.find(fake.url, None)
    with pytest.raises(ServerError, match=f"no server answers at {fake.url}: .*Connect call failed"):
        ask(fake, server=server)


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "WAIT", 0.2)
    with running(silent=True) as fake, pytest.raises(ServerError, match=f"no server answers at {fake.url}: timed out"):
        Server.find(fake.url, None)
