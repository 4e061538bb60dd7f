"""Parallel calls with a timeout."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runs.backends import parallel_calls
from runs.backends.parallel_calls import CallTimeout, call_all


def test_results_have_their_names_in_order() -> None:
    assert call_all({"b": lambda: 1, "a": lambda: 2}) == {"b": 1, "a": 2}
    assert call_all({}) == {}


def test_exception_is_the_result() -> None:
    result = call_all({"fine": lambda: 1, "broken": lambda: 1 // 0})
    assert result["fine"] == 1
    assert isinstance(result["broken"], ZeroDivisionError)


def test_functions_run_in_parallel() -> None:
    together = threading.Barrier(3, timeout=600)
    result = call_all({str(n): together.wait for n in range(3)}, patience_s=30)
    assert sorted(result.values()) == [0, 1, 2]


def test_timeout_does_not_affect_other_results() -> None:
    never = threading.Event()
    result: dict[str, Any] = call_all({"dead": never.wait, "alive": lambda: 1}, patience_s=5.0)
    assert isinstance(result["dead"], CallTimeout)
    assert str(result["dead"]) == "no answer within 5 s"
    assert result["alive"] == 1
    never.set()


def test_late_result_is_ignored() -> None:
    go = threading.Event()
    result: dict[str, Any] = call_all({"late": go.wait}, patience_s=0.05)
    go.set()
    assert isinstance(result["late"], CallTimeout)


def test_number_of_parallel_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_calls, "_places", threading.BoundedSemaphore(1))
    never = threading.Event()
    result: dict[str, Any] = call_all({"first": never.wait, "second": lambda: 1}, patience_s=0.2)
    assert "too many other checks" in str(result["second"])
    never.set()
