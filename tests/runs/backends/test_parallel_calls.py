"""Questions asked at once, with a bound of time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runs.backends import parallel_calls
from runs.backends.parallel_calls import NoAnswer, ask_all


def test_answers_come_under_their_names_in_order() -> None:
    assert ask_all({"b": lambda: 1, "a": lambda: 2}) == {"b": 1, "a": 2}
    assert ask_all({}) == {}


def test_what_was_raised_is_the_answer() -> None:
    found = ask_all({"fine": lambda: 1, "broken": lambda: 1 // 0})
    assert found["fine"] == 1
    assert isinstance(found["broken"], ZeroDivisionError)


def test_all_are_asked_at_once() -> None:
    together = threading.Barrier(3, timeout=30)
    found = ask_all({str(n): together.wait for n in range(3)}, patience_s=30)
    assert sorted(found.values()) == [0, 1, 2]


def test_who_does_not_answer_is_said_so_and_the_others_are_heard() -> None:
    never = threading.Event()
    found: dict[str, Any] = ask_all({"dead": never.wait, "alive": lambda: 1}, patience_s=0.2)
    assert isinstance(found["dead"], NoAnswer)
    assert str(found["dead"]) == "no answer within 0.2 s"
    assert found["alive"] == 1
    never.set()


def test_a_late_answer_changes_nothing() -> None:
    go = threading.Event()
    found: dict[str, Any] = ask_all({"late": go.wait}, patience_s=0.05)
    go.set()
    assert isinstance(found["late"], NoAnswer)


def test_only_so_many_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_calls, "_places", threading.BoundedSemaphore(1))
    never = threading.Event()
    found: dict[str, Any] = ask_all({"first": never.wait, "second": lambda: 1}, patience_s=0.2)
    assert "too many other checks" in str(found["second"])
    never.set()
