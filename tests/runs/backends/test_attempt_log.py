"""The backend's own log of one attempt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from executors.base import AccountError, RetryLater
from runs import redaction
from runs.backends import parallel_calls
from runs.backends.attempt_log import read_log
from runs.models import ReplicaAttempt
from tests.browser import seed, seed_fleet
from tests.dashboard.stub_backend import Stub, stubbed

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


@pytest.fixture
def attempt() -> Any:
    run = seed_fleet.mixed(seed.user("olga", "operator"))
    return ReplicaAttempt.objects.select_related("replica__pool__credential").get(
        replica__run=run, replica__number=3, number=4
    )


def test_lines_and_the_next_position(attempt: Any, modal: Stub) -> None:
    modal.lines = ["one", "two"]
    first = read_log(attempt)
    assert (first.lines, first.position, first.cut) == (("one", "two"), "2", False)
    modal.lines.append("three")
    again = read_log(attempt, after=first.position)
    assert (again.lines, again.position) == (("three",), "3")
    nothing = read_log(attempt, after=again.position)
    assert (nothing.lines, nothing.position) == ((), "3")


def test_newest_lines_of_a_long_log_are_marked_as_cut(attempt: Any, modal: Stub) -> None:
    modal.lines = [str(n) for n in range(50)]
    result = read_log(attempt, lines=10)
    assert result.lines == tuple(str(n) for n in range(40, 50))
    assert result.cut
    assert result.position == "50"


def test_long_line_is_truncated(attempt: Any, modal: Stub) -> None:
    modal.lines = ["x" * 1_000_000]
    assert len(read_log(attempt).lines[0]) == 4000


@pytest.mark.parametrize("error", [RetryLater("503: later"), AccountError("no such token")])
def test_unavailable_log_has_the_message_of_the_backend(
    attempt: Any, modal: Stub, error: Exception
) -> None:
    modal.error = error
    result = read_log(attempt, after="7")
    assert (result.lines, result.position, result.unknown) == ((), "7", str(error))


def test_client_error_shows_no_details(attempt: Any, modal: Stub) -> None:
    modal.error = KeyError("as-inside")
    assert read_log(attempt).unknown == "KeyError from the backend's client"


def test_hanging_backend_times_out(
    attempt: Any, modal: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_calls, "PATIENCE_S", 0.2)
    modal.hang = threading.Event()
    assert read_log(attempt).unknown == "no answer within 0.2 s"


def test_printed_secret_is_redacted(attempt: Any, modal: Stub) -> None:
    redaction.remember(["as-printed-by-mistake"])
    modal.lines = ["env: MODAL_TOKEN_SECRET=as-printed-by-mistake"]
    assert read_log(attempt).lines == ("env: MODAL_TOKEN_SECRET=********",)


def test_attempt_without_a_job_calls_no_backend(attempt: Any, modal: Stub) -> None:
    attempt.handle = None
    modal.error = AssertionError("called")
    assert read_log(attempt).unknown == "the attempt has no job yet"
