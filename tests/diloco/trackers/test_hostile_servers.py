"""Trackers whose servers answer with anything: each problem is one error, without a secret."""

from __future__ import annotations

import io
import json
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.trackers.base import MirroredRun, TrackerError, TrackerRow
from diloco.trackers.mlflow import MLflowTracker

RUN = MirroredRun(id="1234", name="Islands", started_s=1.0)
Answer = Callable[[str], Any]


def tracker(answer: Answer, *, server: str = "http://tracker", **secrets: str) -> MLflowTracker:
    def open(request: urllib.request.Request, *, timeout_s: float) -> Any:
        return io.BytesIO(json.dumps(answer(request.full_url)).encode())

    return MLflowTracker(server, "islands", secrets=secrets, open=open)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"experiment": None},
        {"experiment": {"experiment_id": ["1"]}},
        {"experiment": {"experiment_id": "1/../2"}},
        {"experiment": {"experiment_id": "1" * 10_000}},
        {"experiment": {"experiment_id": "1"}, "runs": 7},
        {"experiment": {"experiment_id": "1"}, "runs": [None]},
        {"experiment": {"experiment_id": "1"}, "runs": {"a": 1}},
        {"experiment": {"experiment_id": "1"}, "run": {"info": {"run_id": "\0"}}},
    ],
)
def test_another_answer_is_an_error_of_the_tracker(answer: Any) -> None:
    with pytest.raises(TrackerError, match="expected an answer of MLflow with"):
        tracker(lambda _: answer).start(RUN, {})


@pytest.mark.parametrize("token", ["hidden\ntext", "hidden☃"])
def test_a_secret_that_no_header_holds_is_not_quoted(token: str) -> None:
    with pytest.raises(TrackerError, match="the header Authorization cannot hold") as refused:
        tracker(lambda _: {}, MLFLOW_TRACKING_TOKEN=token)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("server", ["http://a..b", "http://[::1", "http://h:port"])
def test_an_address_without_a_host_is_an_error_of_the_tracker(server: str) -> None:
    with pytest.raises(TrackerError, match="does not answer"):
        MLflowTracker(server, "islands").start(RUN, {})


def test_a_row_of_many_values_is_delivered_in_requests_that_mlflow_accepts() -> None:
    """Eight evaluations of a checkpoint can have 1,600 metrics at one round."""
    sent: list[list[str]] = []

    def open(request: urllib.request.Request, *, timeout_s: float) -> Any:
        assert isinstance(request.data, bytes)
        sent.append([metric["key"] for metric in json.loads(request.data)["metrics"]])
        return io.BytesIO(b"{}")

    values = {f"m{n}": 1.0 for n in range(1600)}
    row = TrackerRow(number=0, owner="", step=1, wall_s=1.0, values=values)
    MLflowTracker("http://tracker", "islands", open=open).log(RUN, [row], {"run_id": "1"})
    assert [len(keys) for keys in sent] == [1000, 600]
    assert [key for keys in sent for key in keys] == list(values)


class Endless(io.BytesIO):
    """A body without an end, of which each read gets ``size`` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.reads = size, 0

    def read1(self, size: int | None = -1) -> bytes:
        self.reads += 1
        return b"1" * self.size


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Endless(60_000), Endless(1)
    with pytest.raises(TrackerError, match="sent more than 4194304 bytes"):
        MLflowTracker("http://tracker", "islands", open=lambda *_, **__: fast).start(RUN, {})
    assert fast.reads < 100
    clock = SimpleNamespace(monotonic=lambda: 10.0 * slow.reads)
    monkeypatch.setattr("diloco.trackers.http.time", clock)
    with pytest.raises(TrackerError, match="did not answer within 30 s"):
        MLflowTracker("http://tracker", "islands", open=lambda *_, **__: slow).start(RUN, {})
    assert slow.reads == 4


class Redirecting(BaseHTTPRequestHandler):
    """Redirects each request, and answers what is redirected with an object."""

    def do_POST(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_redirected_batch_is_not_delivered() -> None:
    """The redirected request is a GET without the rows."""
    row = TrackerRow(number=0, owner="", step=1, wall_s=1.0, values={"loss": 1.0})
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(TrackerError, match="status 302"):
                MLflowTracker(address, "islands").log(RUN, [row], {"run_id": "1"})
        finally:
            server.shutdown()
            thread.join()
