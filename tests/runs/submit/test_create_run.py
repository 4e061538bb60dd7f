"""Creating a queued run from a draft: atomically, and once per form."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError

from runs.exceptions import InvalidRun
from runs.models import Event, Replica, ReplicaPool, Run
from runs.submit import create
from runs.submit.clone_and_fork import clone_of
from runs.submit.create import CheckedDraft, create_run
from runs.submit.run_draft import PoolDraft, local_demo
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator_user(settings: Any, tmp_path: Path) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri() + "/"
    return w.person("olga", "operator")


def stored() -> tuple[int, ...]:
    return tuple(m.objects.count() for m in (Run, ReplicaPool, Replica, Event))


def test_the_demo_becomes_a_queued_run(
    operator_user: Any, settings: Any, outbox: list[Any], clock: w.Clock
) -> None:
    demo = local_demo()
    run = create_run(demo, owner=operator_user, submit_key="k")
    run.refresh_from_db()
    assert (run.state, run.owner, run.name) == ("queued", operator_user, demo.name)
    assert (run.created_at, run.state_since, run.started_at) == (clock(), clock(), None)
    assert run.group_settings == demo.settings.to_dict()
    assert run.workload == demo.workload.to_dict()
    assert run.rendezvous == f"{settings.DEFAULT_RENDEZVOUS.rstrip('/')}/{run.pk}"
    assert [r.number for r in run.replicas.all()] == [0, 1, 2, 3]
    assert set(run.replicas.values_list("state", flat=True)) == {"pending"}
    [event] = run.events.all()
    assert (event.from_state, event.to_state, event.actor) == ("draft", "queued", operator_user)
    assert outbox == [("launch_run", str(run.pk))]


def test_tags_of_the_submission_are_those_of_the_run(operator_user: Any, outbox: list[Any]) -> None:
    draft = replace(local_demo(), tags=("paper", "small"))
    run = create_run(draft, owner=operator_user, submit_key="k")
    run.refresh_from_db()
    assert run.tags == ["paper", "small"]
    assert clone_of(run).tags == ("paper", "small")
    Run.objects.update(tags=["a b", "paper", 7, "x" * 41])
    run.refresh_from_db()
    assert clone_of(run).tags == ("paper",), "an edited journal can have any"
    with pytest.raises(InvalidRun, match="tags: expected at most 20 tags, found 21"):
        many = replace(draft, tags=tuple(f"t{n}" for n in range(21)))
        create_run(many, owner=operator_user, submit_key="other")


def test_numbers_go_on_from_pool_to_pool(operator_user: Any, outbox: list[Any]) -> None:
    pools = (PoolDraft(count=2), PoolDraft(count=1, hardware="gpu"))
    run = create_run(w.draft(replicas=3, pools=pools), owner=operator_user, submit_key="k")
    result = run.replicas.values_list("number", "pool__hardware")
    assert list(result) == [(0, "cpu"), (1, "cpu"), (2, "gpu")]


def test_one_key_makes_one_run_and_one_launch(operator_user: Any, outbox: list[Any]) -> None:
    first = create_run(w.draft(), owner=operator_user, submit_key="k")
    before = stored()
    again = create_run(w.draft(name="Another"), owner=operator_user, submit_key="k")
    assert again == first
    assert stored() == before
    assert len(outbox) == 1


def test_two_concurrent_requests_create_one_run(
    operator_user: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both check before either inserts; the insert of the second conflicts with the first row."""
    first = create_run(w.draft(), owner=operator_user, submit_key="k")
    before = stored()
    real, checked = create._submitted, []

    def too_early(model: Any, submit_key: str, owner: Any) -> Any:
        checked.append(submit_key)
        return None if len(checked) == 1 else real(model, submit_key, owner)

    monkeypatch.setattr(create, "_submitted", too_early)
    assert create_run(w.draft(), owner=operator_user, submit_key="k") == first
    assert len(checked) == 2
    assert stored() == before
    assert len(outbox) == 1


def test_a_run_created_during_the_preflight_is_returned(
    operator_user: Any, outbox: list[Any]
) -> None:
    """A request with the same key finishes first, and its run uses the rendezvous."""
    faster: list[Run] = []

    def preflight(checked: CheckedDraft) -> None:
        faster.append(create_run(w.draft(), owner=operator_user, submit_key="k"))
        raise InvalidRun("rendezvous", "expected an unused prefix")

    assert create_run(w.draft(), owner=operator_user, submit_key="k", preflight=preflight) in faster
    with pytest.raises(InvalidRun, match="unused"):
        create_run(w.draft(), owner=operator_user, submit_key="other", preflight=refuse)
    assert Run.objects.count() == 1


def refuse(checked: CheckedDraft) -> None:
    raise InvalidRun("rendezvous", "expected an unused prefix")


def test_another_integrity_error_is_not_swallowed(
    operator_user: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = create_run(w.draft(), owner=operator_user, submit_key="other")
    monkeypatch.setattr(uuid, "uuid4", lambda: taken.pk)
    monkeypatch.setattr(create, "check_draft", lambda draft, run_id, **_: "file:///elsewhere")
    with pytest.raises(IntegrityError):
        create_run(w.draft(), owner=operator_user, submit_key="k")


def test_another_user_s_key_is_refused(operator_user: Any, outbox: list[Any]) -> None:
    create_run(w.draft(), owner=operator_user, submit_key="k")
    with pytest.raises(InvalidRun) as caught:
        create_run(w.draft(), owner=w.person("oscar", "operator"), submit_key="k")
    assert caught.value.field == "submit_key"
    assert Run.objects.count() == 1


@pytest.mark.parametrize("step", ["bulk_create", "record_event", "enqueue"])
def test_a_failed_creation_leaves_no_rows(
    operator_user: Any, outbox: list[Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("killed")

    target = Replica.objects if step == "bulk_create" else create
    with monkeypatch.context() as patch:
        patch.setattr(target, step, die)
        with pytest.raises(RuntimeError, match="killed"):
            create_run(w.draft(), owner=operator_user, submit_key="k")
    assert stored() == (0, 0, 0, 0)
    assert outbox == []
    assert create_run(w.draft(), owner=operator_user, submit_key="k").replicas.count() == 2


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
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
def test_an_error_names_its_field(
    operator_user: Any, changes: dict[str, Any], field: str, expected: str
) -> None:
    with pytest.raises(InvalidRun) as caught:
        create_run(w.draft(**changes), owner=operator_user, submit_key="k")
    assert caught.value.field == field
    assert expected in caught.value.message
    assert stored() == (0, 0, 0, 0)


@pytest.mark.parametrize("key", ["", "x" * 65])
def test_a_form_without_a_usable_key_is_refused(operator_user: Any, key: str) -> None:
    with pytest.raises(InvalidRun) as caught:
        create_run(w.draft(), owner=operator_user, submit_key=key)
    assert caught.value.field == "submit_key"


def test_a_prefix_belongs_to_one_run_in_every_spelling(
    operator_user: Any, outbox: list[Any], tmp_path: Path
) -> None:
    run = create_run(w.draft(rendezvous=f"{tmp_path}/mine/"), owner=operator_user, submit_key="1")
    assert run.rendezvous == (tmp_path / "mine").as_uri()
    for spelling in (f"{tmp_path}/mine", (tmp_path / "mine").as_uri() + "/"):
        with pytest.raises(InvalidRun) as caught:
            create_run(w.draft(rendezvous=spelling), owner=operator_user, submit_key=spelling[-60:])
        assert caught.value.field == "rendezvous"


def test_a_credential_opens_only_its_kind_of_bucket(operator_user: Any) -> None:
    from runs.actions.credentials import save_credential
    from runs.models import Credential

    bucket = Credential(name="bucket", kind="store", options={"scheme": "s3"})
    save_credential(bucket, typed={"AWS_ACCESS_KEY_ID": "k"}, actor=None)
    with pytest.raises(InvalidRun, match=r"to be in s3://, found file:") as caught:
        create_run(w.draft(store_credential=bucket.pk), owner=operator_user, submit_key="k")
    assert caught.value.field == "rendezvous"
    draft = w.draft(store_credential=bucket.pk, rendezvous="s3://b/run")
    assert create_run(draft, owner=operator_user, submit_key="k").store_credential == bucket
