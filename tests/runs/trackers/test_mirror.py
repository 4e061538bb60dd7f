"""A run mirrored to a tracker: each point once, whatever dies when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.utils import timezone

from diloco.trackers.base import MirroredRun, Outcome, TrackerError, TrackerRow
from diloco.trackers.opening import Destination
from runs.actions import trackers as actions
from runs.credentials.vault import unseal
from runs.metrics.blocks import Points
from runs.metrics.downsampling import add_points
from runs.models import ExperimentTracker, Replica, Run, RunMirror
from runs.queries.exports import points_of
from runs.states import RunState
from runs.trackers import mirror
from tests.browser import seed
from tests.matrix import matrix
from tests.runs import run_harness as w

Place = tuple[str, int]


class Killed(BaseException):
    """The worker was killed: no handler of the product sees it."""


class RecordingTracker:
    """Stores each row number once, as trackers do. ``fates`` are actions of the next calls."""

    def __init__(self) -> None:
        self.rows: dict[int, TrackerRow] = {}
        self.outcomes: list[Outcome] = []
        self.calls = 0
        self.fates: dict[int, str] = {}

    def start(self, run: MirroredRun, state: dict[str, Any]) -> dict[str, Any]:
        self._call()
        return {"started": True}

    def log(
        self, run: MirroredRun, rows: Sequence[TrackerRow], state: dict[str, Any]
    ) -> dict[str, Any]:
        assert state["started"]
        fate = self._call()
        for row in rows[: len(rows) // 2] if fate == "half" else rows:
            stored = self.rows.setdefault(row.number, row)
            assert stored.to_dict() == row.to_dict(), "a repeated row has other content"
        if fate in ("after", "half"):
            raise Killed
        return {**state, "rows": len(self.rows)}

    def finish(self, run: MirroredRun, outcome: Outcome, state: dict[str, Any]) -> dict[str, Any]:
        self._call()
        self.outcomes.append(outcome)
        return state

    def url(self, state: Mapping[str, Any]) -> str:
        return ""

    def _call(self) -> str:
        fate = self.fates.pop(self.calls, "")
        self.calls += 1
        if fate == "before":
            raise Killed
        if fate == "error":
            raise TrackerError("status 503")
        return fate

    def values(self) -> dict[tuple[str, int], float]:
        result: dict[tuple[str, int], float] = {}
        for row in self.rows.values():
            for name, value in row.named_values().items():
                assert (name, row.step) not in result, f"{name} at {row.step} is there twice"
                result[name, row.step] = value
        return result


def exported(run: Run) -> dict[tuple[str, int], float]:
    """The points of the run's export, by the names of a tracker."""
    result = {}
    for chunk in points_of(run):
        columns = ("series", "replica", "step", "round", "value")
        for series, replica, step, round, value in zip(*(chunk[c] for c in columns), strict=True):
            name = series if replica is None else f"replica/{replica}/{series}"
            result[name, round if replica is None else step] = value
    return result


def points(first: int, last: int, *, per_round: int = 10, scale: float = 1.0) -> Points:
    steps = list(range(first, last))
    return Points.of(
        step=steps,
        round=[1 + step // per_round for step in steps],
        tokens=[100 * step for step in steps],
        wall_s=[1.9e9 + step for step in steps],
        value=[math.nan if step == 7 else scale / (1 + step) for step in steps],
    )


@pytest.fixture
def run(db: Any, clock: w.Clock) -> Run:
    made: Run = seed.run(seed.user("olga", "operator"), committed=0, replicas=2)
    return made


@pytest.fixture
def tracker() -> RecordingTracker:
    return RecordingTracker()


@pytest.fixture
def row(run: Run) -> RunMirror:
    place = ExperimentTracker.objects.create(
        name="board", kind="mlflow", server="https://x.example", project="p",
        created_at=timezone.now(),
    )  # fmt: skip
    return RunMirror.objects.create(
        run=run, tracker=place, next_at=timezone.now(), created_at=timezone.now()
    )


def grow(run: Run, committed: int, *, steps: tuple[int, int]) -> None:
    for replica in Replica.objects.filter(run=run):
        new = {"loss": points(*steps), "lr": points(*steps, scale=1e-3)}
        add_points(run, replica, new, key="step")
    rounds = Points.of(
        step=[10 * committed], round=[committed], tokens=[1], wall_s=[1.9e9], value=[0.5]
    )
    add_points(run, None, {"eval_loss": rounds}, key="round")
    Run.objects.filter(pk=run.pk).update(next_round=committed + 1, committed_rounds=committed)


def end(run: Run, clock: w.Clock, state: str = RunState.SUCCEEDED) -> None:
    Run.objects.filter(pk=run.pk).update(state=state, ended_at=clock())


def passes(row: RunMirror, tracker: RecordingTracker, clock: w.Clock, count: int = 1) -> RunMirror:
    for _ in range(count):
        clock.pass_s(3600)
        try:
            mirror.mirror(str(row.pk), opener=lambda _: tracker)
        except Killed:
            continue
    row.refresh_from_db()
    return row


def test_points_of_committed_rounds_are_delivered(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock
) -> None:
    grow(run, 2, steps=(0, 25))
    passes(row, tracker, clock)
    assert max(step for name, step in tracker.values() if name == "replica/1/loss") == 19
    assert ("eval_loss", 2) in tracker.values()

    grow(run, 3, steps=(25, 30))
    passes(row, tracker, clock)
    assert len([name for name, _ in tracker.values() if name == "replica/0/lr"]) == 30
    assert row.points == len(tracker.values())
    assert not tracker.outcomes


@matrix("fate", ["before", "after", "half", "error"], fast=("half",))
def test_each_point_is_delivered_once_whenever_a_worker_dies(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock, fate: str
) -> None:
    tracker.fates = dict.fromkeys(range(0, 40, 2), fate)
    for committed in range(1, 5):
        grow(run, committed, steps=(600 * (committed - 1), 600 * committed))
        passes(row, tracker, clock, 2)
    end(run, clock)
    assert passes(row, tracker, clock, 40).state == RunMirror.State.FINISHED
    found, expected = tracker.values(), exported(run)
    assert found.keys() == expected.keys()
    assert all(
        found[place] == value or (math.isnan(value) and math.isnan(found[place]))
        for place, value in expected.items()
    )
    assert set(tracker.outcomes) == {"succeeded"}
    assert sorted(tracker.rows) == list(range(row.number))


def test_a_failing_tracker_is_retried_ever_later_and_reported_once(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock
) -> None:
    grow(run, 1, steps=(0, 10))
    tracker.fates = dict.fromkeys(range(3), "error")
    waits = []
    for _ in range(3):
        passes(row, tracker, clock)
        waits.append((row.next_at - clock()).total_seconds())
    assert waits == [10, 20, 40]
    assert row.message == "status 503"
    passes(row, tracker, clock)
    assert (row.failures, row.message) == (0, "")
    events = run.events.filter(kind="mirror").order_by("pk").values_list("level", "message")
    assert list(events) == [
        ("warning", "metrics could not be mirrored to board: status 503"),
        ("info", "metrics are mirrored to board again"),
    ]


def test_a_second_worker_does_nothing_during_a_pass(
    run: Run, row: RunMirror, tracker: RecordingTracker
) -> None:
    grow(run, 1, steps=(0, 10))
    RunMirror.objects.filter(pk=row.pk).update(next_at=timezone.now() + timedelta(seconds=60))
    mirror.mirror(str(row.pk), opener=lambda _: tracker)
    assert tracker.calls == 0


def test_a_mirror_of_a_resumed_run_goes_on(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock, monkeypatch: Any
) -> None:
    grow(run, 1, steps=(0, 10))
    end(run, clock, RunState.FAILED)
    assert passes(row, tracker, clock, 3).state == RunMirror.State.FINISHED
    Run.objects.filter(pk=run.pk).update(state=RunState.RUNNING, ended_at=None)
    sent: list[Any] = []
    monkeypatch.setattr(mirror, "enqueue", lambda *call: sent.append(call))
    mirror.call_for_due()
    assert sent == [("mirror_run", str(row.pk))]
    grow(run, 2, steps=(10, 20))
    passes(row, tracker, clock)
    assert tracker.values().keys() == exported(run).keys()
    assert tracker.outcomes == ["failed"]


def test_tensorboard_files_have_the_points_of_the_export(
    run: Run, row: RunMirror, clock: w.Clock, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ExperimentTracker.objects.update(kind="tensorboard", server=str(tmp_path), project="")
    grow(run, 3, steps=(0, 30))
    mirror.mirror(str(row.pk))
    saved = dict(RunMirror.objects.values().get(pk=row.pk))
    grow(run, 5, steps=(30, 50))
    clock.pass_s(3600)
    mirror.mirror(str(row.pk))
    # A worker that was killed before it stored the result of its pass: the pass is repeated.
    del saved["id"]
    RunMirror.objects.filter(pk=row.pk).update(**saved)
    end(run, clock)
    clock.pass_s(3600)
    mirror.mirror(str(row.pk))

    [folder] = tmp_path.iterdir()
    read = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    scalars = [(name, e.step) for name in read.Tags()["scalars"] for e in read.Scalars(name)]
    assert len(scalars) == len(set(scalars))
    assert set(scalars) == exported(run).keys()
    values = {
        (name, e.step): e.value for name in read.Tags()["scalars"] for e in read.Scalars(name)
    }
    assert values["replica/0/loss", 29] == pytest.approx(1 / 30, rel=1e-6)


def evaluated(run: Run, *rounds: int) -> None:
    """Store results of an evaluation, as :mod:`runs.evaluations.results` does."""
    for at in rounds:
        result = Points.of(step=[10 * at], round=[at], tokens=[1], wall_s=[1.9e9], value=[0.5])
        add_points(run, None, {"eval-val-loss": result}, key="round")
        mirror.resume_finished(run)


def test_an_evaluation_of_an_older_round_is_delivered_after_that_of_a_newer_one(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock
) -> None:
    grow(run, 3000, steps=(0, 10))
    for rounds in ((20, 2000), (10, 2500), (5, 1500, 1990)):
        evaluated(run, *rounds)
        passes(row, tracker, clock, 2)
    assert tracker.values().keys() == exported(run).keys()


def test_an_evaluation_of_a_run_that_ended_is_delivered(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock
) -> None:
    grow(run, 1, steps=(0, 10))
    end(run, clock)
    assert passes(row, tracker, clock, 3).state == RunMirror.State.FINISHED
    evaluated(run, 1)
    assert passes(row, tracker, clock, 3).state == RunMirror.State.FINISHED
    assert tracker.values().keys() == exported(run).keys()
    assert tracker.outcomes == ["succeeded"]


def test_a_tracker_with_another_address_gets_all_points_again(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock
) -> None:
    grow(run, 2, steps=(0, 20))
    passes(row, tracker, clock)
    place, actor = row.tracker, run.owner
    actions.save_tracker(
        "board",
        Destination(kind="mlflow", server="https://1.1.1.1", project="p"),
        secrets={},
        actor=actor,
        tracker=place,
    )
    elsewhere = RecordingTracker()
    passes(RunMirror.objects.get(), elsewhere, clock)
    assert elsewhere.values().keys() == tracker.values().keys() != set()


def saved(actor: Any, row: ExperimentTracker | None, server: str, **secrets: str) -> Any:
    place = Destination(kind="mlflow", server=server, project="p")
    return actions.save_tracker("safe", place, secrets=secrets, actor=actor, tracker=row)


def test_a_stored_secret_is_never_sent_to_another_address(run: Run) -> None:
    row = saved(run.owner, None, "https://1.1.1.1", MLFLOW_TRACKING_USERNAME="u",
                MLFLOW_TRACKING_PASSWORD="old")  # fmt: skip
    saved(run.owner, row, "https://1.1.1.1/")  # the same address: the secrets are kept
    assert unseal(row.sealed, name="safe")["MLFLOW_TRACKING_PASSWORD"] == "old"
    again = "enter MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_USERNAME again"
    for address in ("https://1.0.0.1", "http://1.1.1.1", "https://1.1.1.1:8443"):
        with pytest.raises(ValueError, match=again):
            saved(run.owner, row, address)
    row.refresh_from_db()
    assert row.server == "https://1.1.1.1/"
    saved(run.owner, row, "https://1.0.0.1", MLFLOW_TRACKING_TOKEN="new")
    assert unseal(row.sealed, name="safe") == {"MLFLOW_TRACKING_TOKEN": "new"}


def test_the_address_of_a_wandb_server_is_checked(run: Run, settings: Any) -> None:
    settings.ALLOWED_ADDRESSES = []

    def save(server: str) -> ExperimentTracker:
        place = Destination(kind="wandb", server=server, project="p")
        secrets = {"WANDB_API_KEY": "key"}
        return actions.save_tracker("wb", place, secrets=secrets, actor=run.owner)

    with pytest.raises(ValueError, match="expected an address such as"):
        save("file:///etc")
    with pytest.raises(ValueError, match="expected a public address, found"):
        save("https://10.0.0.1")
    with pytest.raises(ValueError, match="Weights & Biases uses no WANDB_BASE_URL"):
        saved_secrets = {"WANDB_BASE_URL": "https://10.0.0.1"}
        place = Destination(kind="wandb", project="p")
        actions.save_tracker("wb", place, secrets=saved_secrets, actor=run.owner)
    row = save("https://1.1.1.1")
    mirror.open_stored(row)
    ExperimentTracker.objects.filter(pk=row.pk).update(server="https://10.0.0.1")
    row.refresh_from_db()
    with pytest.raises(TrackerError, match="expected a public address"):
        mirror.open_stored(row)


def test_secrets_can_be_entered_again_when_the_stored_ones_cannot_be_read(run: Run) -> None:
    row = saved(run.owner, None, "https://1.1.1.1", MLFLOW_TRACKING_TOKEN="old")
    row.sealed = "x" * 100
    row.save()
    with pytest.raises(ValueError, match="Or enter the secrets again"):
        saved(run.owner, row, "https://1.1.1.1")
    saved(run.owner, row, "https://1.1.1.1", MLFLOW_TRACKING_TOKEN="new")
    assert unseal(row.sealed, name="safe") == {"MLFLOW_TRACKING_TOKEN": "new"}


def test_an_address_that_was_stored_unchecked_fails_its_mirrors_and_can_be_corrected(
    run: Run,
) -> None:
    row = saved(run.owner, None, "https://1.1.1.1", MLFLOW_TRACKING_TOKEN="old")
    ExperimentTracker.objects.update(server="no-address")
    row.refresh_from_db()
    with pytest.raises(TrackerError, match="expected an address such as"):
        mirror.open_stored(row)
    saved(run.owner, row, "https://1.1.1.1", MLFLOW_TRACKING_TOKEN="new")
    assert row.server == "https://1.1.1.1"


def test_an_unexpected_error_is_shown_and_retried_ever_later(
    run: Run, row: RunMirror, clock: w.Clock
) -> None:
    """Also the time limit of the task: otherwise a tracker that sends a byte now and then has both
    workers of mirrors for ever."""
    grow(run, 1, steps=(0, 10))
    calls = []

    def slow(_: ExperimentTracker) -> Any:
        calls.append(clock())
        raise SoftTimeLimitExceeded(240)

    waits = []
    for _ in range(3):
        clock.pass_s(3600)
        mirror.mirror(str(row.pk), opener=slow)
        row.refresh_from_db()
        waits.append((row.next_at - clock()).total_seconds())
    assert (len(calls), waits) == (3, [10, 20, 40])
    assert row.message.startswith("SoftTimeLimitExceeded")
    assert run.events.filter(kind="mirror", level="warning").count() == 1


def test_a_tracker_that_is_not_enabled_receives_nothing(
    run: Run, row: RunMirror, tracker: RecordingTracker, clock: w.Clock, monkeypatch: Any
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(mirror, "enqueue", lambda *call: sent.append(call))
    grow(run, 1, steps=(0, 10))
    ExperimentTracker.objects.update(enabled=False)
    assert passes(row, tracker, clock).state == RunMirror.State.ACTIVE
    mirror.call_for_due()
    assert (tracker.calls, sent) == (0, [])
    ExperimentTracker.objects.update(enabled=True)
    mirror.call_for_due()
    assert sent == [("mirror_run", str(row.pk))]
    passes(row, tracker, clock)
    assert tracker.values()
