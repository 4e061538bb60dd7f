"""Uploads by obstore: its concurrency is the limit of the line, and objects are measured."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import obstore
import pytest
from obstore.exceptions import GenericError

from diloco.clock import SystemClock
from diloco.store import s3
from diloco.store.base import StoreUnavailable
from diloco.store.metered import MeteredStore
from diloco.store.retry import RetryingStore
from diloco.store.transfer_limit import Stage
from diloco.store.transfers import Line
from tests.diloco.clocks import ManualClock
from tests.emulators.faults import HangUp
from tests.emulators.http_server import Exchange, HttpServer

ACCESS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    line = Line(clock=SystemClock(), most=16)
    monkeypatch.setattr(s3, "UPLOAD_LINE", line)
    return line


def test_an_upload_has_as_many_parts_in_flight_as_the_line_allows(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def put(client: object, key: str, parts: Iterator[bytes], **options: Any) -> None:
        limits.append(options["max_concurrency"])
        assert len(list(parts)) == 20

    monkeypatch.setattr(obstore, "put", put)
    store = s3.ObstoreStore("s3://bucket/run", environment=ACCESS)
    for _ in range(2):
        store.put_stream("a", lambda: [b"x"] * 20)
    assert limits == [4, 8], "the second upload begins where the first one ended"


def test_an_upload_of_a_known_size_has_its_parts_in_equal_turns(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def put(client: object, key: str, parts: Iterator[bytes], **options: Any) -> None:
        limits.append(options["max_concurrency"])
        assert len(list(parts)) == 9

    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(s3, "PART_BYTES", 1000)
    line._state = replace(line._state, stage=Stage.HOLD)
    store = MeteredStore(
        RetryingStore(
            s3.ObstoreStore("s3://bucket/run", environment=ACCESS),
            clock=ManualClock(),
            rng=random.Random(0),
            deadline_s=60.0,
        )
    )
    store.put_stream("a", lambda: [b"x"] * 9, size_bytes=8001)
    store.put_stream("a", lambda: [b"x"] * 9)
    assert limits == [5, 4]


def test_an_upload_without_a_thread_can_be_retried_and_returns_its_slot(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = s3.ObstoreStore("s3://bucket/run", environment=ACCESS)
    with pytest.raises(StoreUnavailable, match="a: expected a thread to upload in, found: can't"):
        store.put_stream("a", lambda: [b"x"] * 20)
    assert line._granted == 0


def test_an_upload_that_fails_halves_the_limit(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(client: object, key: str, parts: Iterator[bytes], **options: Any) -> None:
        raise GenericError("non-2xx status code: 503 <Code>SlowDown</Code><Message>slow<")

    monkeypatch.setattr(obstore, "put", put)
    store = s3.ObstoreStore("s3://bucket/run", environment=ACCESS)
    with pytest.raises(StoreUnavailable):
        store.put_stream("a", lambda: [b"x"] * 20)
    assert line.limit == 2


SLOW_DOWN, INTERNAL_ERROR, TOO_MANY, REQUEST_TIMEOUT, HANG_UP = (
    (503, "SlowDown"),
    (500, "InternalError"),
    (429, "TooManyRequests"),
    (400, "RequestTimeout"),
    (0, "hang up"),
)
"""Status and error code of a part that is refused; 0 closes the connection instead."""


class Uploads:
    """The multipart requests of S3, without objects: ``refusals`` are the times that each part is
    refused, as ``refusal``; ``calls`` counts the requests by verb and part, ``sent`` the bytes of
    parts."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        self.refusal = SLOW_DOWN
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __call__(self, request: Exchange) -> None:
        query = parse_qs(request.address.query, keep_blank_values=True)
        part = query.get("partNumber", [""])[0]
        self.calls["begin" if "uploads" in query else f"{request.command}{part}"] += 1
        if part:
            self.sent[part] += len(request.body)
        body, headers = "<Result><ETag>x</ETag></Result>", {"ETag": "x"}
        if "uploads" in query:
            body = "<Result><Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId></Result>"
        if 0 < self.calls[f"PUT{part}"] <= self.refusals[part]:
            status, code = self.refusal
            if not status:
                raise HangUp
            body = f"<Error><Code>{code}</Code><Message>slow</Message></Error>"
            request.answer(status, body.encode(), "text/xml")
        else:
            request.answer(200, body.encode(), "text/xml", headers)


@pytest.fixture
def uploads() -> Iterator[tuple[Uploads, dict[str, str]]]:
    uploads = Uploads()
    server = HttpServer(uploads).start()
    yield uploads, ACCESS | {"AWS_ENDPOINT_URL": server.url}
    server.stop()


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 1000)
    monkeypatch.setattr(s3, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(s3, "LONGEST_BACKOFF_S", 0.002)


@pytest.mark.usefixtures("line", "_small")
@pytest.mark.parametrize(
    "refusal", [SLOW_DOWN, INTERNAL_ERROR, TOO_MANY, HANG_UP], ids=lambda refusal: refusal[1]
)
def test_an_interrupted_upload_continues_with_the_parts_that_are_stored(
    uploads: tuple[Uploads, dict[str, str]], refusal: tuple[int, str]
) -> None:
    """Only the bytes of the part that failed are sent again."""
    server, access = uploads
    server.refusal = refusal
    server.refusals["3"] = 20
    s3.ObstoreStore("s3://bucket/run", environment=access).put_stream(
        "a", lambda: [bytes(1000)] * 5
    )
    once = dict.fromkeys(("begin", "PUT1", "PUT2", "PUT4", "PUT5", "POST"), 1)
    assert server.calls == once | {"PUT3": 21}
    assert server.sent == dict.fromkeys("1245", 1000) | {"3": 21_000}


@pytest.mark.usefixtures("line", "_small")
def test_an_upload_with_a_part_that_is_refused_starts_again(
    uploads: tuple[Uploads, dict[str, str]],
) -> None:
    """obstore does not retry this status; the whole object is sent again
    (docs/adr/0036-uploads-that-continue.md)."""
    server, access = uploads
    server.refusal = REQUEST_TIMEOUT
    server.refusals["5"] = 1
    store = RetryingStore(
        s3.ObstoreStore("s3://bucket/run", environment=access),
        clock=ManualClock(),
        rng=random.Random(0),
        deadline_s=60.0,
    )
    store.put_stream("a", lambda: [bytes(1000)] * 5)
    assert (server.calls["begin"], server.calls["DELETE"], server.calls["POST"]) == (2, 1, 1)
    assert server.sent["5"] == 2000


@pytest.mark.usefixtures("line", "_small")
def test_an_upload_that_cannot_continue_is_aborted(
    uploads: tuple[Uploads, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "UPLOAD_RETRIES", 5)
    server, access = uploads
    server.refusals["3"] = 1000
    store = s3.ObstoreStore("s3://bucket/run", environment=access)
    with pytest.raises(StoreUnavailable, match="a: 503 SlowDown: slow"):
        store.put_stream("a", lambda: [bytes(1000)] * 5)
    assert (server.calls["begin"], server.calls["DELETE"], server.calls["POST"]) == (1, 1, 0)
