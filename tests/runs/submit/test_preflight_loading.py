"""The import of a client library does not count towards a check's timeout, and is reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from executors.loading import Loader
from runs.backends import parallel_calls
from runs.submit import preflight
from runs.submit.run_draft import PoolDraft
from tests.dashboard.stub_backend import Stub, stubbed

pytestmark = pytest.mark.django_db


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


def test_a_client_that_is_still_loading_is_reported_and_then_checked(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    loader = Loader(lambda backend: go_on.wait(600))
    monkeypatch.setattr(preflight, "wait_loaded", loader.wait_loaded)
    monkeypatch.setattr(preflight, "LOAD_PATIENCE_S", 0.01)
    answer = preflight.check_pool_connection(PoolDraft(backend="modal"), index=2)
    [problem] = answer.problems
    assert problem.field == "pools.2.backend"
    assert "Modal is still loading" in problem.message
    assert "Check again" in problem.message
    go_on.set()
    monkeypatch.setattr(preflight, "LOAD_PATIENCE_S", 60.0)
    assert preflight.check_pool_connection(PoolDraft(backend="modal")).account == stub.who


def test_the_timeout_of_a_check_starts_after_the_import(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    real = parallel_calls.call_all

    def load(backend: str) -> None:
        order.append(f"loaded {backend}")

    monkeypatch.setattr(preflight, "wait_loaded", Loader(load).wait_loaded)
    monkeypatch.setattr(
        preflight, "call_all", lambda questions: order.append("called") or real(questions)
    )
    assert preflight.check_pool_connection(PoolDraft(backend="modal")).account == stub.who
    assert order == ["loaded modal", "called"]
