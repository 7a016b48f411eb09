"""A Hugging Face Hub on this machine: repositories in memory, as far as kvfold's calls of its client reach."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "hf_of_nobody"


class FakeHub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, dict[str, bytes]] = {}  # per repository, by name
        self.private: set[str] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repository: str) -> str:
        names = sorted((name, hashlib.sha1(content).hexdigest()) for name, content in self.files[repository].items())
        return hashlib.sha1(json.dumps(names).encode()).hexdigest()


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.strip("/").split("/")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        if parts == ["api", "repos", "create"]:
            asked = json.loads(text)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.files.setdefault(name, {})
            self.server.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
            return self._send(200, {"url": f"{self.server.endpoint}/{name}"})
        if parts == ["api", "validate-yaml"]:  # the front of a card
            return self._send(200, {"errors": [], "warnings": []})
        name, kind = "/".join(parts[2:4]), parts[4]
        if kind == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(text)["files"]]
            return self._send(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        for line in map(json.loads, text.splitlines()):  # of a commit
            if line["key"] == "file":
                self.server.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = self.server.commit(name)
        return self._send(200, {"commitOid": commit, "commitUrl": f"{self.server.endpoint}/{name}/commit/{commit}"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts == [""]:
            return self._send(200, {})
        if parts[0] == "api":  # models/OWNER/NAME, then revision/REVISION or tree/REVISION
            name, kind = "/".join(parts[2:4]), parts[4:5]
            if name not in self.server.files:
                return self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            files = self.server.files[name]
            if kind == ["tree"]:
                tree = [
                    {"type": "file", "oid": "0" * 40, "size": len(each), "path": path} for path, each in files.items()
                ]
                return self._send(200, tree)
            siblings = [{"rfilename": path, "size": len(each)} for path, each in files.items()]
            return self._send(200, {"id": name, "sha": self.server.commit(name), "siblings": siblings})
        name, content = "/".join(parts[:2]), self.server.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if content is None:
            return self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.server.commit(name)}
        return self._send(200, content, etag)

    def _send(self, status: int, answer: object, headers: dict[str, str] | None = None) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
