"""Fixtures for the tests of :mod:`runs`: a clock, a backend, enqueued tasks, and a launched run."""

from __future__ import annotations

import copy
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from tests.module_rows import Unblock
from tests.runs import run_harness as w
from tests.runs.ingest_harness import IngestHarness


def patched_clock(patch: pytest.MonkeyPatch) -> w.Clock:
    made = w.Clock()
    patch.setattr("django.utils.timezone.now", made)
    return made


def patched_executor(patch: pytest.MonkeyPatch) -> w.FakeExecutor:
    made = w.FakeExecutor()
    for module in ("reconcile.launch", "reconcile.jobs"):
        patch.setattr(f"runs.{module}.executor_for", lambda pool: made)
    return made


def patched_outbox(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(task, *args) of every enqueued task. ``test_task_queue`` checks that they are sent
    after the commit."""
    sent: list[tuple[Any, ...]] = []
    for module in (
        "actions.replicas_and_pools",
        "actions.lifecycle",
        "submit.create",
        "reconcile.launch",
        "reconcile.replicas",
        "reconcile.reconciler",
        "reconcile.sweeps",
        "tasks",
        "actions.admin_overrides",
        "admin.replicas",
    ):
        patch.setattr(
            f"runs.{module}.enqueue", lambda task, *args, expires=None: sent.append((task, *args))
        )
    return sent


def patched_publish(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect the deltas that are published to viewers."""
    deltas: list[dict[str, Any]] = []
    patch.setattr("runs.live_stream.publish", lambda run_id, delta: not deltas.append(delta))
    return deltas


def create(**changes: Any) -> Any:
    """Create a queued run as the submit form does; group settings by keyword."""
    from runs.submit.create import create_run

    owner = changes.pop("owner", None) or w.person("olga", "operator")
    return create_run(w.draft(**changes), owner=owner, submit_key=uuid.uuid4().hex)


def launched(run: Any, patch: pytest.MonkeyPatch, *workers: Any) -> Harness:
    """Launch the run with a clock, an executor and an outbox."""
    return Harness(run, *workers, patched_publish(patch))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> w.Clock:
    return patched_clock(monkeypatch)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> w.FakeExecutor:
    return patched_executor(monkeypatch)


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return patched_outbox(monkeypatch)


@pytest.fixture
def make_run(db: None, tmp_path: Path, outbox: Any, settings: Any) -> Callable[..., Any]:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    return create


@pytest.fixture
def make_harness(
    make_run: Callable[..., Any],
    clock: w.Clock,
    executor: w.FakeExecutor,
    outbox: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Harness]:
    def make(**changes: Any) -> Harness:
        return launched(make_run(**changes), monkeypatch, clock, executor, outbox)

    return make


@pytest.fixture(scope="module")
def share_harness(
    module_rows: Unblock, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SharedHarness]:
    """Launches a run that the tests of a module share: each gets it by ``copy_harness``.

    ``begin`` prepares the harness. By default its replicas start.
    """

    def make(begin: Callable[[Harness], None] = Harness.start, **changes: Any) -> SharedHarness:
        folder = tmp_path_factory.mktemp("shared")
        with pytest.MonkeyPatch.context() as patch, module_rows():
            patch.setattr(settings, "DEFAULT_RENDEZVOUS", (folder / "rendezvous").as_uri())
            workers = patched_clock(patch), patched_executor(patch), patched_outbox(patch)
            harness = launched(create(**changes), patch, *workers)
            begin(harness)
        return SharedHarness(harness, folder)

    return make


@pytest.fixture
def copy_harness(
    db: None,
    clock: w.Clock,
    executor: w.FakeExecutor,
    outbox: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[SharedHarness], Harness]:
    """Gives a test the shared run with its jobs, its bucket and the time as they were at first."""
    return lambda shared: shared.copy(clock, executor, outbox, patched_publish(monkeypatch))


@pytest.fixture
def ingest(make_run: Callable[..., Any], clock: w.Clock) -> IngestHarness:
    return IngestHarness(make_run(), clock)


class Harness:
    """One launched run, and the tasks of its workers."""

    def __init__(
        self,
        run: Any,
        clock: w.Clock,
        executor: w.FakeExecutor,
        outbox: list[tuple[Any, ...]],
        deltas: list[dict[str, Any]],
    ) -> None:
        from runs.ingest.stores import store_for
        from runs.reconcile.launch import launch_run

        self.run, self.clock, self.executor = run, clock, executor
        self.outbox, self.deltas = outbox, deltas
        self.bucket = w.Bucket(store_for(run), wall_s=clock().timestamp())
        self.beats = 0
        launch_run(str(run.pk))
        self.work()
        run.refresh_from_db()

    def work(self) -> None:
        """Run the enqueued launches, as a worker does."""
        from runs.reconcile.launch import launch_replica

        due = dict.fromkeys(self.outbox)
        self.outbox.clear()
        for task, pool_id, *_ in due:
            if task == "launch_pool":
                waiting = self.run.replicas.filter(pool_id=pool_id).order_by("number")
                for pk in list(waiting.values_list("pk", flat=True)):
                    launch_replica(pk)

    def tick(self, after_s: float = 1.0) -> Any:
        """Advance the clock and run :func:`tests.runs.run_harness.tick`."""
        self.clock.pass_s(after_s)
        w.tick(str(self.run.pk), self.outbox)
        self.run.refresh_from_db()
        return self.run

    def ingest(self) -> None:
        """Run one pass of ingest without control."""
        from runs.ingest.ingest_pass import ingest_run

        ingest_run(str(self.run.pk))
        self.run.refresh_from_db()

    def control(self, after_s: float = 1.0) -> Any:
        """Run one tick of control without ingest."""
        from runs.reconcile.reconciler import reconcile_run

        self.clock.pass_s(after_s)
        reconcile_run(str(self.run.pk))
        self.run.refresh_from_db()
        return self.run

    def beat_all(self, state: str = "computing", *, but: tuple[int, ...] = (), **more: Any) -> None:
        self.beats += 1
        for replica in self.run.replicas.all():
            if replica.number not in but:
                self.bucket.beat(replica.number, self.beats, state, **more)

    def start(self) -> None:
        """Write a heartbeat of every replica, then run a tick."""
        self.beat_all()
        self.tick()

    def replica(self, number: int = 0) -> Any:
        return self.run.replicas.get(number=number)

    def key(self, number: int = 0, attempt: int = 1) -> str:
        return self.replica(number).attempts.get(number=attempt).launch_key

    def events(self, kind: str) -> list[str]:
        """Messages of the events of this kind, oldest first."""
        result = self.run.events.filter(kind=kind).order_by("id")
        return [event.message for event in result]


class SharedHarness:
    """A harness whose run is in the rows of a module (:mod:`tests.module_rows`)."""

    def __init__(self, harness: Harness, folder: Path) -> None:
        self._harness = harness
        self._bucket, self._saved = folder / "rendezvous", folder / "saved"
        shutil.copytree(self._bucket, self._saved)

    def copy(
        self,
        clock: w.Clock,
        executor: w.FakeExecutor,
        outbox: list[tuple[Any, ...]],
        deltas: list[dict[str, Any]],
    ) -> Harness:
        """The harness with this clock, executor and outbox, which take over the state of its."""
        shutil.rmtree(self._bucket, ignore_errors=True)
        shutil.copytree(self._saved, self._bucket)
        copied, source = copy.copy(self._harness), self._harness
        for own, other in ((clock, source.clock), (executor, source.executor)):
            vars(own).update(copy.deepcopy(vars(other)))
        outbox[:], deltas[:] = source.outbox, source.deltas
        copied.clock, copied.executor = clock, executor
        copied.outbox, copied.deltas = outbox, deltas
        copied.run = copy.deepcopy(source.run)
        copied.bucket = copy.copy(source.bucket)
        return copied
