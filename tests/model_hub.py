"""An emulator of the Hugging Face Hub's HTTP API as far as models use it.

No package provides such a server. It keeps the files of one model in memory. ``islands/gated`` is
gated, ``others`` are read-only repositories, any other name is not found. A commit carries all its
files. Not emulated: datasets (see :mod:`tests.hub_server`), large-file transfers, branches.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "islands/trained"
TOKEN = "hf_test_token"


class ModelHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, bytes] = {}
        self.others: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, object]] = []

    @property
    def env(self) -> dict[str, str]:
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route(b"")

    def do_GET(self) -> None:
        self._route(b"")

    def do_POST(self) -> None:
        self._route(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _route(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        api = f"/api/models/{REPO}"
        if path == "/":
            self._respond(200, {})
        elif "islands/gated" in path:
            error = {"error": "Access to model islands/gated is restricted."}
            self._respond(403, error, {"X-Error-Code": "GatedRepo"})
        elif path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._respond(200, {"url": f"{self.server.url}/{REPO}", "name": REPO})
        elif path == f"{api}/preupload/main":
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._respond(200, {"files": modes})
        elif path == f"{api}/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            url = f"{self.server.url}/{REPO}/commit/{1:040x}"
            self._respond(200, {"success": True, "commitUrl": url, "commitOid": f"{1:040x}"})
        elif (content := self._other(path)) is not None:
            self._file(content)
        elif (listing := self._listing(path)) is not None:
            self._respond(200, listing)
        elif path in (api, f"{api}/revision/main"):
            self._respond(200, {"id": REPO, "sha": f"{0:040x}", "siblings": []})
        elif path == "/api/validate-yaml":
            self._respond(200, {"errors": [], "warnings": []})
        elif path[1:].partition("/resolve/")[0] in self.server.others:
            self._respond(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        else:
            self._respond(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def _other(self, path: str) -> bytes | None:
        """A file of another repository: ``/<repository>/resolve/main/<file>``."""
        repository, _, rest = path[1:].partition("/resolve/")
        return self.server.others.get(repository, {}).get(rest.partition("/")[2])

    def _listing(self, path: str) -> dict[str, object] | list[object] | None:
        repository = path.removeprefix("/api/models/").partition("/revision/")[0]
        tree, _, _ = repository.partition("/tree/")
        if tree not in self.server.others:
            return None
        names = sorted(self.server.others[tree])
        if "/tree/" in path:
            return [{"type": "file", "path": name, "oid": "0" * 40, "size": 1} for name in names]
        siblings = [{"rfilename": name} for name in names]
        return {"id": tree, "sha": f"{2:040x}", "siblings": siblings}

    def _file(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", f"{2:040x}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _respond(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def running_model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
