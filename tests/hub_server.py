"""An emulator of the Hugging Face Hub's HTTP API as far as ``hf://datasets/...`` uses it.

No package provides such a server. It keeps one dataset in memory and requires a token; the real
client finds it through ``HF_ENDPOINT``. Commits are applied one at a time and, as on the Hub,
cannot be conditional on a missing file. Not emulated: large-file transfers (every file is part
of its commit), other branches, paging.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.bucket_servers import BucketServer

REPO = "islands/archipelago"
TOKEN = "hf_test_token"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, bytes] = {}
        self.commits = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close the connection."""

    def commit(self, lines: list[dict[str, Any]]) -> str:
        with self.lock:
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    self.files.pop(value["path"], None)
            self.commits += 1
            return f"{self.commits:040x}"

    def entries(self, folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        with self.lock:
            files = dict(self.files)
        return [
            entry(path, data) for path, data in sorted(files.items()) if path.startswith(prefix)
        ]


def entry(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": oid}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route("GET", b"")

    def do_HEAD(self) -> None:
        self._route("HEAD", b"")

    def do_POST(self) -> None:
        self._route("POST", self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _route(self, method: str, body: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._respond(401, {"error": "Invalid username or password."})
            return
        path = urlsplit(self.path).path
        api, files = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/main/"
        if path.startswith(files):
            self._file(unquote(path.removeprefix(files)))
        elif path in (api, f"{api}/revision/main"):
            self._respond(200, {"id": REPO, "sha": f"{self.server.commits:040x}", "siblings": []})
        elif match := re.fullmatch(rf"{api}/tree/main/?(.*)", path):
            self._tree(unquote(match[1]))
        elif method == "POST" and path == f"{api}/preupload/main":
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._respond(200, {"files": modes})
        elif method == "POST" and path == f"{api}/commit/main":
            oid = self.server.commit([json.loads(line) for line in body.splitlines()])
            url = f"{self.server.url}/datasets/{REPO}/commit/{oid}"
            self._respond(200, {"success": True, "commitUrl": url, "commitOid": oid})
        elif method == "POST" and path == f"{api}/paths-info/main":
            paths = parse_qs(body.decode())["paths"]
            self._respond(200, [e for e in self.server.entries("") if e["path"] in paths])
        else:
            self._not_found("RepoNotFound")

    def _tree(self, folder: str) -> None:
        entries = self.server.entries(folder)
        if not entries and folder:
            self._not_found("EntryNotFound")
            return
        query = parse_qs(urlsplit(self.path).query)
        if query.get("recursive", ["false"])[0].lower() != "true":
            start = len(folder) + 1 if folder else 0
            files = [one for one in entries if "/" not in one["path"][start:]]
            names = {one["path"][start:].split("/")[0] for one in entries} - {
                one["path"][start:] for one in files
            }
            folders = [
                {
                    "type": "directory",
                    "path": folder + "/" * bool(folder) + name,
                    "oid": "0",
                    "size": 0,
                }
                for name in sorted(names)
            ]
            entries = [*folders, *files]
        self._respond(200, entries)

    def _file(self, path: str) -> None:
        with self.server.lock:
            data = self.server.files.get(path)
        if data is None:
            self._not_found("EntryNotFound")
            return
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not requested:
            self._respond(200, data)
            return
        start = int(requested[1])
        end = min(len(data), int(requested[2]) + 1) if requested[2] else len(data)
        if start >= len(data):
            self._respond(416, {"error": "Range not satisfiable"})
        else:
            headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            self._respond(206, data[start:end], headers)

    def _not_found(self, code: str) -> None:
        self._respond(404, {"error": code}, {"X-Error-Code": code})

    def _respond(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", f"{self.server.commits:040x}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def running_hub() -> Iterator[BucketServer]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield BucketServer(
            uri=f"hf://datasets/{REPO}",
            env={"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"},
        )
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
