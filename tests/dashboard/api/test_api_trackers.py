"""Trackers through the API: list them, mirror a run, stop, submit a run that is mirrored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.trackers.opening import Destination
from runs.actions import trackers
from runs.credentials.vault import unseal
from runs.models import AuditEntry, RunMirror
from runs.queries import trackers as tracker_queries
from runs.submit.clone_and_fork import clone_of
from tests.browser import seed
from tests.dashboard.api.test_row_types import fields_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def board(settings: Any) -> Any:
    settings.ALLOWED_ADDRESSES = ["127.0.0.1"]
    return trackers.save_tracker(
        "board",
        Destination(kind="mlflow", server="http://127.0.0.1:5000", project="islands"),
        secrets={"MLFLOW_TRACKING_TOKEN": "t-123"},
        actor=seed.user("root", "admin"),
    )


def test_mirror_and_stop(owner: Any, run: Any, board: Any) -> None:
    [listed] = owner.get("/trackers").json()
    assert (listed["name"], listed["kind_label"], listed["project"]) == (
        "board",
        "MLflow",
        "islands",
    )
    assert "t-123" not in str(listed)
    path = f"/runs/{run.pk}/mirrors"
    assert owner.post(path, {"tracker": "board"}).json()["changed"] is True
    assert owner.post(path, {"tracker": "board"}).json()["changed"] is False
    [row] = owner.get(path).json()
    assert (row["tracker"], row["state"], row["points"]) == ("board", "active", 0)
    assert owner.post(f"{path}/stop", {"tracker": "board"}).json()["changed"] is True
    assert owner.post(f"{path}/stop", {"tracker": "board"}).json()["changed"] is False
    assert owner.post(path, {"tracker": "board"}).json()["changed"] is True
    assert RunMirror.objects.get(run=run).state == RunMirror.State.ACTIVE
    events = run.events.filter(kind="mirror").order_by("pk").values_list("message", flat=True)
    assert list(events) == [
        "metrics are mirrored to board",
        "metrics are no longer mirrored to board",
        "metrics are mirrored to board",
    ]


def test_an_unknown_tracker_is_refused_with_the_known_ones(
    owner: Any, run: Any, board: Any
) -> None:
    response = owner.post(f"/runs/{run.pk}/mirrors", {"tracker": "bord"})
    assert response.status_code == 409
    assert response.json()["detail"] == "expected a tracker (board), found 'bord'"


def test_a_viewer_cannot_mirror(
    program: Any, token_of: Callable[..., str], run: Any, board: Any
) -> None:
    viewer = program(token_of("vera", "viewer"))
    assert viewer.get("/trackers").status_code == 200
    assert viewer.post(f"/runs/{run.pk}/mirrors", {"tracker": "board"}).status_code == 403


def test_a_copy_has_the_same_trackers(run: Any, board: Any) -> None:
    trackers.mirror_run(run, "board", actor=run.owner)
    assert clone_of(run).trackers == (board.pk,)


def test_rows_have_the_fields_of_the_client(run: Any, board: Any) -> None:
    from archipelago.tracker_rows import Mirror, Tracker

    trackers.mirror_run(run, "board", actor=run.owner)
    assert set(tracker_queries.tracker_rows()[0]) == fields_of(Tracker)
    assert set(tracker_queries.mirror_rows(run)[0]) == fields_of(Mirror)


@pytest.mark.parametrize(
    ("kind", "server", "project", "message"),
    [
        ("mlflow", "", "islands", "Tracking server: enter a value; MLflow needs it"),
        ("mlflow", "ftp://x", "islands", "expected an address such as"),
        ("mlflow", "https://u:p@x.example", "islands", "an address without secrets"),
        ("mlflow", "http://10.0.0.7", "islands", "expected a public address"),
        ("tensorboard", "logs", "", "expected an absolute path, found 'logs'"),
        ("tensorboard", "/logs", "islands", "TensorBoard has no such field"),
        ("neptune", "", "", "expected a kind of tensorboard, mlflow"),
    ],
)
def test_a_wrong_tracker_is_refused_with_what_to_enter(
    db: Any, kind: str, server: str, project: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trackers.save_tracker(
            "board",
            Destination(kind=kind, server=server, project=project),
            secrets={},
            actor=seed.user("root", "admin"),
        )


def test_secrets_are_encrypted_and_kept_until_they_are_replaced(board: Any) -> None:
    actor = seed.user("root", "admin")
    assert "t-123" not in board.sealed
    where = Destination(kind="mlflow", server="http://127.0.0.1:5000", project="other")
    for secret, expected in (("", "t-123"), ("t-456", "t-456")):
        trackers.save_tracker(
            "board",
            where,
            secrets={"MLFLOW_TRACKING_TOKEN": secret},
            actor=actor,
            tracker=board,
        )
        board.refresh_from_db()
        assert unseal(board.sealed, name="board") == {"MLFLOW_TRACKING_TOKEN": expected}
    kinds = AuditEntry.objects.filter(target="tracker board").values_list("action", flat=True)
    assert sorted(kinds) == ["tracker.added", "tracker.changed", "tracker.changed"]
