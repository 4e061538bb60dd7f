"""From a draft to a queued run: whole or not at all, and once per form."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError

from runs.exceptions import InvalidRun
from runs.models import Event, Replica, ReplicaPool, Run
from runs.submit import create
from runs.submit.create import create_run
from runs.submit.run_draft import PoolDraft, local_demo
from tests.runs import world as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def olga(settings: Any, tmp_path: Path) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri() + "/"
    return w.person("olga", "operator")


def stored() -> tuple[int, ...]:
    return tuple(m.objects.count() for m in (Run, ReplicaPool, Replica, Event))


def test_the_demo_becomes_a_queued_run(
    olga: Any, settings: Any, outbox: list[Any], clock: w.Clock
) -> None:
    demo = local_demo()
    run = create_run(demo, owner=olga, submit_key="k")
    run.refresh_from_db()
    assert (run.state, run.owner, run.name) == ("queued", olga, demo.name)
    assert (run.created_at, run.state_since, run.started_at) == (clock(), clock(), None)
    assert run.group_settings == demo.settings.to_dict()
    assert run.workload == demo.workload.to_dict()
    assert run.rendezvous == f"{settings.DEFAULT_RENDEZVOUS.rstrip('/')}/{run.pk}"
    assert [r.number for r in run.replicas.all()] == [0, 1, 2, 3]
    assert set(run.replicas.values_list("state", flat=True)) == {"pending"}
    [event] = run.events.all()
    assert (event.from_state, event.to_state, event.actor) == ("draft", "queued", olga)
    assert outbox == [("launch_run", str(run.pk))]


def test_numbers_go_on_from_pool_to_pool(olga: Any, outbox: list[Any]) -> None:
    pools = (PoolDraft(count=2), PoolDraft(count=1, hardware="gpu"))
    run = create_run(w.draft(replicas=3, pools=pools), owner=olga, submit_key="k")
    found = run.replicas.values_list("number", "pool__hardware")
    assert list(found) == [(0, "cpu"), (1, "cpu"), (2, "gpu")]


def test_one_key_makes_one_run_and_one_launch(olga: Any, outbox: list[Any]) -> None:
    first = create_run(w.draft(), owner=olga, submit_key="k")
    before = stored()
    again = create_run(w.draft(name="Another"), owner=olga, submit_key="k")
    assert again == first
    assert stored() == before
    assert len(outbox) == 1


def test_two_requests_at_once_make_one_run(
    olga: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looked before either wrote; the second meets the first's row."""
    first = create_run(w.draft(), owner=olga, submit_key="k")
    before = stored()
    real, looked = create._submitted, []

    def too_early(submit_key: str, owner: Any) -> Any:
        looked.append(submit_key)
        return None if len(looked) == 1 else real(submit_key, owner)

    monkeypatch.setattr(create, "_submitted", too_early)
    assert create_run(w.draft(), owner=olga, submit_key="k") == first
    assert len(looked) == 2
    assert stored() == before
    assert len(outbox) == 1


def test_another_integrity_error_is_not_swallowed(
    olga: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = create_run(w.draft(), owner=olga, submit_key="other")
    monkeypatch.setattr(uuid, "uuid4", lambda: taken.pk)
    monkeypatch.setattr(create, "check_draft", lambda draft, run_id, **_: "file:///elsewhere")
    with pytest.raises(IntegrityError):
        create_run(w.draft(), owner=olga, submit_key="k")


def test_somebody_else_s_key_is_refused(olga: Any, outbox: list[Any]) -> None:
    create_run(w.draft(), owner=olga, submit_key="k")
    with pytest.raises(InvalidRun) as caught:
        create_run(w.draft(), owner=w.person("oscar", "operator"), submit_key="k")
    assert caught.value.field == "submit_key"
    assert Run.objects.count() == 1


@pytest.mark.parametrize("step", ["bulk_create", "record_event", "enqueue"])
def test_nothing_is_left_of_a_run_that_was_half_made(
    olga: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("killed")

    target = Replica.objects if step == "bulk_create" else create
    with monkeypatch.context() as patch:
        patch.setattr(target, step, die)
        with pytest.raises(RuntimeError, match="killed"):
            create_run(w.draft(), owner=olga, submit_key="k")
    assert stored() == (0, 0, 0, 0)
    assert outbox == []
    assert create_run(w.draft(), owner=olga, submit_key="k").replicas.count() == 2


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"name": "  "}, "name", "expected 1 to 80 characters, found 0"),
        ({"name": "x" * 81}, "name", "found 81"),
        ({"pools": ()}, "pools", "expected at least one pool"),
        ({"pools": (PoolDraft(backend="moon", count=2),)}, "pools.0.backend", "found 'moon'"),
        (
            {"pools": (PoolDraft(count=0), PoolDraft(count=2))},
            "pools.0.count",
            "1 to 1024 replicas",
        ),
        ({"pools": (PoolDraft(count=3),)}, "pools", "target of 2 replicas, found 3"),
        ({"time_limit_s": -1}, "time_limit_s", "found -1"),
        ({"rendezvous": "here/or/there"}, "rendezvous", "absolute path, found 'here/or/there'"),
        ({"rendezvous": "s3://" + "x" * 500}, "rendezvous", "at most 500 characters"),
    ],
)
def test_what_is_wrong_is_said_of_its_field(
    olga: Any, changes: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(InvalidRun) as caught:
        create_run(w.draft(**changes), owner=olga, submit_key="k")
    assert caught.value.field == field
    assert said in caught.value.message
    assert stored() == (0, 0, 0, 0)


@pytest.mark.parametrize("key", ["", "x" * 65])
def test_a_form_without_a_usable_key_is_refused(olga: Any, key: str) -> None:
    with pytest.raises(InvalidRun) as caught:
        create_run(w.draft(), owner=olga, submit_key=key)
    assert caught.value.field == "submit_key"


def test_a_prefix_belongs_to_one_run_however_it_is_written(
    olga: Any, outbox: list[Any], tmp_path: Path
) -> None:
    run = create_run(w.draft(rendezvous=f"{tmp_path}/mine/"), owner=olga, submit_key="1")
    assert run.rendezvous == (tmp_path / "mine").as_uri()
    for spelling in (f"{tmp_path}/mine", (tmp_path / "mine").as_uri() + "/"):
        with pytest.raises(InvalidRun) as caught:
            create_run(w.draft(rendezvous=spelling), owner=olga, submit_key=spelling[-60:])
        assert caught.value.field == "rendezvous"


def test_a_credential_opens_only_its_kind_of_bucket(olga: Any) -> None:
    from runs.actions.credentials import save_credential
    from runs.models import Credential

    bucket = Credential(name="bucket", kind="store", options={"scheme": "s3"})
    save_credential(bucket, typed={"AWS_ACCESS_KEY_ID": "k"}, actor=None)
    with pytest.raises(InvalidRun, match=r"to be in s3://, found file:") as caught:
        create_run(w.draft(store_credential=bucket.pk), owner=olga, submit_key="k")
    assert caught.value.field == "rendezvous"
    draft = w.draft(store_credential=bucket.pk, rendezvous="s3://b/run")
    assert create_run(draft, owner=olga, submit_key="k").store_credential == bucket
