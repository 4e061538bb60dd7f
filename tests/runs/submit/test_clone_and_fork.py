"""Clones and forks in the control plane."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationSpec
from diloco.protocol.records import CheckpointManifest, StoredObject
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from runs.actions import evaluations, replicas_and_pools
from runs.exceptions import InvalidRun
from runs.ingest.stores import store_for
from runs.models import Run
from runs.reconcile.group_publishing import group_document
from runs.reconcile.launch import launch_run
from runs.submit import clone_and_fork
from runs.submit.create import create_run
from runs.submit.evaluation_plans import draft_of
from runs.submit.run_draft import Fork, PlanDraft, PoolDraft
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def harness(make_harness: Callable[..., Any]) -> Any:
    made = make_harness(replicas=2, time_limit_s=60, max_restarts=7)
    made.start()
    return made


def with_checkpoint(harness: Any, *rounds: int) -> bytes:
    """Write complete checkpoints as replicas do; return their weights."""
    import hashlib

    data, store = b"weights" * 100, harness.bucket.store
    for round in rounds:
        harness.bucket.checkpoint(round)
        folder = keys.checkpoint_dir(round, 0, w.incarnation(0))
        store.put(f"{folder}weights.safetensors", data)
        manifest = dataclasses.replace(
            CheckpointManifest.from_bytes(store.get(keys.checkpoint_manifest(round))),
            weights=StoredObject(
                key=f"{folder}weights.safetensors",
                size_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            ),
        )
        store.put(keys.checkpoint_manifest(round), manifest.to_bytes())
        harness.bucket.commit(round or 1, (0, 1))
    harness.beat_all()
    harness.tick()
    return data


def submit(draft: Any, harness: Any) -> Any:
    return create_run(draft, owner=harness.run.owner, submit_key=uuid.uuid4().hex)


def test_a_clone_has_the_original_settings_and_the_current_pools(harness: Any) -> None:
    replicas_and_pools.scale_pool(harness.run.pools.get(), 3, actor=harness.run.owner)
    harness.run.refresh_from_db()
    draft = clone_and_fork.clone_of(harness.run)
    assert draft == w.draft(
        name="Test run (copy)",
        replicas=3,
        time_limit_s=60,
        max_restarts=7,
        pools=(PoolDraft(count=3, price_usd_h=draft.pools[0].price_usd_h),),
    )
    again = submit(draft, harness)
    assert again.group_settings == harness.run.group_settings | {"num_replicas": 3}
    assert again.rendezvous != harness.run.rendezvous


def test_a_clone_and_a_fork_have_the_evaluations_of_the_run(harness: Any) -> None:
    plan = PlanDraft(
        name="bench", spec=EvaluationSpec(tokens=0, tasks=("arc_easy",)), every=2, timeout_s=600
    )
    evaluations.save_plan(harness.run, plan, actor=harness.run.owner)
    evaluations.save_plan(harness.run, PlanDraft(name="removed"), actor=harness.run.owner)
    evaluations.remove_plan(harness.run, "removed", actor=harness.run.owner)
    with_checkpoint(harness, 0, 1)
    for draft in (clone_and_fork.clone_of(harness.run), clone_and_fork.fork_of(harness.run, 1)):
        assert draft.evaluations == (plan,)
        again = submit(draft, harness)
        assert [draft_of(row) for row in again.evaluation_plans.all()] == [plan]
        assert again.evaluation_plans.get().created_by == harness.run.owner


def test_a_fork_cannot_begin_to_compare_frozen_parameters(harness: Any) -> None:
    with_checkpoint(harness, 0, 1)
    Run.objects.update(group_settings=harness.run.group_settings | {"frozen": "local"})
    harness.run.refresh_from_db()
    draft = clone_and_fork.fork_of(harness.run, 1)
    submit(draft, harness)
    equal = dataclasses.replace(draft.settings, frozen="equal")
    with pytest.raises(InvalidRun, match="frozen: expected 'local' as in 'Test run'"):
        submit(dataclasses.replace(draft, settings=equal), harness)


def test_a_clone_of_an_earlier_version_has_the_default_of_a_replaced_setting(harness: Any) -> None:
    settings = {k: v for k, v in harness.run.group_settings.items() if k != "late_keep"}
    Run.objects.update(group_settings=settings | {"late_policy": "overwrite"})
    harness.run.refresh_from_db()
    draft = clone_and_fork.clone_of(harness.run)
    assert draft.settings.late_keep == GroupSettings().late_keep
    again = submit(draft, harness)
    assert "late_policy" not in again.group_settings
    assert group_document(harness.run, "").settings == draft.settings


def test_a_clone_gets_a_prefix_next_to_a_custom_rendezvous(harness: Any) -> None:
    Run.objects.update(rendezvous="s3://bucket/mine")
    harness.run.refresh_from_db()
    beside = clone_and_fork.clone_of(harness.run).rendezvous
    assert beside.startswith("s3://bucket/mine-")
    assert beside != clone_and_fork.clone_of(harness.run).rendezvous
    Run.objects.update(rendezvous=f"s3://bucket/{uuid.uuid4()}")
    harness.run.refresh_from_db()
    assert clone_and_fork.clone_of(harness.run).rendezvous.startswith("s3://bucket/")


def test_a_long_name_stays_valid(harness: Any) -> None:
    harness.run.name = "n" * 80
    assert len(clone_and_fork.clone_of(harness.run).name) == 80
    assert clone_and_fork.fork_of(harness.run, 3).name.endswith("n (from round 3)")


def test_a_fork_starts_from_the_checkpoint_in_a_separate_rendezvous(harness: Any) -> None:
    data = with_checkpoint(harness, 0, 1)
    assert clone_and_fork.forkable(harness.run) == [1, 0]
    fork = submit(clone_and_fork.fork_of(harness.run, 1), harness)
    assert (fork.forked_from, fork.fork_round, fork.fork_outer) == (harness.run.pk, 1, True)
    assert "starting with round 1 of 'Test run'" in fork.events.get(kind="run_state").message
    launch_run(str(fork.pk))
    launch_run(str(fork.pk))
    fork.refresh_from_db()
    assert fork.state == "provisioning"
    store = store_for(fork)
    manifest = CheckpointManifest.from_bytes(store.get(keys.checkpoint_manifest(0)))
    assert store.get(manifest.weights.key) == data
    assert (manifest.round, manifest.base_rounds, manifest.tokens_total) == (0, (0,), 0)


def test_the_checkpoint_is_written_before_the_group(harness: Any) -> None:
    """Replicas that join as soon as the group exists must not initialise other weights."""
    with_checkpoint(harness, 0, 1)
    fork = submit(clone_and_fork.fork_of(harness.run, 1), harness)
    harness.bucket.store.delete(
        [f"{keys.checkpoint_dir(1, 0, w.incarnation(0))}weights.safetensors"]
    )
    launch_run(str(fork.pk))
    fork.refresh_from_db()
    assert fork.state == "failed"
    assert "expected a checkpoint of round 1" in fork.state_reason
    assert store_for(fork).list("") == [] or not [
        info for info in store_for(fork).list("") if info.key == keys.GROUP
    ]


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"fork": Fork(run=uuid.UUID(int=1), round=1)}, "fork_round", "found none"),
        ({"round": 7}, "fork_round", r"kept \(1, 0\), found round 7"),
        ({"workload": ByteGPTWorkload(size="mini")}, "size", "expected 'demo' .* found 'mini'"),
        ({"num_fragments": 2}, "num_fragments", "expected 1 as in 'Test run'"),
    ],
)
def test_an_impossible_fork_is_refused_at_its_field(
    harness: Any, changes: dict[str, Any], field: str, message: str
) -> None:
    with_checkpoint(harness, 0, 1)
    draft = clone_and_fork.fork_of(harness.run, changes.pop("round", 1))
    if fragments := changes.pop("num_fragments", None):
        settings = dataclasses.replace(draft.settings, num_fragments=fragments)
        changes["settings"] = settings
        without = dataclasses.replace(draft, settings=settings, name="without outer state")
        submit(
            dataclasses.replace(without, fork=dataclasses.replace(draft.fork, outer=False)), harness
        )
    with pytest.raises(InvalidRun, match=message) as error:
        submit(dataclasses.replace(draft, **changes), harness)
    assert error.value.field == field


def test_a_fork_of_a_deleted_run_fails_with_the_reason(harness: Any) -> None:
    with_checkpoint(harness, 0, 1)
    fork = submit(clone_and_fork.fork_of(harness.run, 1), harness)
    Run.objects.filter(pk=harness.run.pk).delete()
    launch_run(str(fork.pk))
    fork.refresh_from_db()
    assert fork.state == "failed"
    assert "found none" in fork.state_reason
