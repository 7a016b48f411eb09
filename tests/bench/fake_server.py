"""An OpenAI endpoint in the process of a test, which answers after known delays."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

FIRST, NEXT = 0.1, 0.02  # seconds to the first token, and from one to the next


@dataclass
class FakeServer:
    """An OpenAI endpoint that records its requests. An event holds two tokens, as of servers under load."""

    models: tuple[str, ...] = ("tiny",)
    version_path: str = "/version"
    metrics: str | None = None
    status: int = 200
    missing: int = 0  # tokens per answer that never come
    breaks: str = ""  # where the connection is closed: "early", before an answer, or "late", in the middle of one
    gives_up: bool = False  # an event says so
    silent: bool = False  # nothing but completions is answered
    text: str = "a b"  # of an event
    prompts: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    together: list[int] = field(default_factory=list)  # per request, how many ran when it came
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _ = (await reader.readline()).decode().split()
        length = 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = json.loads(await reader.readexactly(length)) if method == "POST" else None
        self.running += body is not None
        try:
            with suppress(ConnectionError):  # the client has left
                await (self.complete(body, writer) if body else self.get(path, writer))
        finally:
            self.running -= body is not None
            writer.close()

    async def get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            await asyncio.sleep(60)
        pages = {
            "/v1/models": json.dumps({"data": [{"id": model} for model in self.models]}),
            self.version_path: json.dumps({"version": "1.2.3"}),
            "/metrics": self.metrics,
        }
        text = pages.get(path)
        status = "404 Not Found" if text is None else "200 OK"
        content = (text or "").encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()

    async def complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.prompts.append(body)
        self.together.append(self.running)
        if self.breaks == "early":
            return
        if self.status != 200:
            writer.write(f"HTTP/1.1 {self.status} Bad Request\r\n\r\n".encode() + b'{"message": "context too long"}')
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = body["max_tokens"] - self.missing
        await asyncio.sleep(FIRST)
        for token in range(0, count, 2):
            await asyncio.sleep(NEXT if token else 0)
            done = token + 2 >= count
            choice = {"text": self.text, "finish_reason": ("stop" if self.missing else "length") if done else None}
            self.send(writer, {"choices": [choice], "usage": None})
            if self.gives_up:
                self.send(writer, {"error": {"message": "out of memory"}})
            if self.breaks:
                return
            await asyncio.sleep(0 if done else NEXT)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        self.send(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def send(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        """An event in two chunks, which end anywhere."""
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        for part in (data[:7], data[7:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@contextmanager
def running(**options: Any) -> Iterator[FakeServer]:
    fake, loop = FakeServer(**options), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.serve, "127.0.0.1", 0, limit=2**24))
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
