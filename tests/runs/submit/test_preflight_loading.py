"""The import of a client library takes no time from a check's answer, and is reported."""

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
    loader = Loader(lambda backend: go_on.wait(60))
    monkeypatch.setattr(preflight, "wait_loaded", loader.wait_loaded)
    monkeypatch.setattr(preflight, "LOAD_PATIENCE_S", 0.01)
    answer = preflight.try_pool(PoolDraft(backend="modal"), place=2)
    [finding] = answer.findings
    assert finding.field == "pools.2.backend"
    assert "Modal is still being loaded" in finding.message
    assert "Check again" in finding.message
    go_on.set()
    monkeypatch.setattr(preflight, "LOAD_PATIENCE_S", 60.0)
    assert preflight.try_pool(PoolDraft(backend="modal")).said == stub.who


def test_the_clock_of_the_answer_starts_after_the_import(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    real = parallel_calls.ask_all

    def load(backend: str) -> None:
        order.append(f"loaded {backend}")

    monkeypatch.setattr(preflight, "wait_loaded", Loader(load).wait_loaded)
    monkeypatch.setattr(
        preflight, "ask_all", lambda questions: order.append("asked") or real(questions)
    )
    assert preflight.try_pool(PoolDraft(backend="modal")).said == stub.who
    assert order == ["loaded modal", "asked"]
