"""Clones and forks, as far as the control plane makes them."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, StoredObject
from diloco.protocol.workload import ByteGPTWorkload
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.ingest.stores import store_for
from runs.models import Run
from runs.reconcile.launch import launch_run
from runs.submit import clone_and_fork
from runs.submit.run_draft import Fork, PoolDraft
from tests.runs import world as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2, time_limit_s=60, max_restarts=7)
    made.start()
    return made


def with_checkpoint(world: Any, *rounds: int) -> bytes:
    """Whole checkpoints, as replicas write them; their weights."""
    import hashlib

    data, store = b"weights" * 100, world.bucket.store
    for round in rounds:
        world.bucket.checkpoint(round)
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
        world.bucket.commit(round or 1, (0, 1))
    world.beat_all()
    world.tick()
    return data


def submit(draft: Any, world: Any) -> Any:
    return replicas_and_pools.create_run(draft, owner=world.run.owner, submit_key=uuid.uuid4().hex)


def test_a_clone_is_the_draft_it_was_with_the_pools_as_they_are(world: Any) -> None:
    replicas_and_pools.scale_pool(world.run.pools.get(), 3, actor=world.run.owner)
    world.run.refresh_from_db()
    draft = clone_and_fork.clone_of(world.run)
    assert draft == w.draft(
        name="Test run (copy)", replicas=3, time_limit_s=60, max_restarts=7,
        pools=(PoolDraft(count=3, price_usd_h=draft.pools[0].price_usd_h),),
    )  # fmt: skip
    again = submit(draft, world)
    assert again.group_settings == world.run.group_settings | {"num_replicas": 3}
    assert again.rendezvous != world.run.rendezvous


def test_a_clone_lies_beside_a_rendezvous_that_was_chosen(world: Any) -> None:
    Run.objects.update(rendezvous="s3://bucket/mine")
    world.run.refresh_from_db()
    beside = clone_and_fork.clone_of(world.run).rendezvous
    assert beside.startswith("s3://bucket/mine-")
    assert beside != clone_and_fork.clone_of(world.run).rendezvous
    Run.objects.update(rendezvous=f"s3://bucket/{uuid.uuid4()}")
    world.run.refresh_from_db()
    assert clone_and_fork.clone_of(world.run).rendezvous.startswith("s3://bucket/")


def test_a_long_name_stays_one_that_is_taken(world: Any) -> None:
    world.run.name = "n" * 80
    assert len(clone_and_fork.clone_of(world.run).name) == 80
    assert clone_and_fork.fork_of(world.run, 3).name.endswith("n (from round 3)")


def test_a_fork_begins_with_the_checkpoint_in_a_rendezvous_of_its_own(world: Any) -> None:
    data = with_checkpoint(world, 0, 1)
    assert clone_and_fork.forkable(world.run) == [1, 0]
    fork = submit(clone_and_fork.fork_of(world.run, 1), world)
    assert (fork.forked_from, fork.fork_round, fork.fork_outer) == (world.run.pk, 1, True)
    assert "to begin with round 1 of 'Test run'" in fork.events.get(kind="run_state").message
    launch_run(str(fork.pk))
    launch_run(str(fork.pk))
    fork.refresh_from_db()
    assert fork.state == "provisioning"
    store = store_for(fork)
    manifest = CheckpointManifest.from_bytes(store.get(keys.checkpoint_manifest(0)))
    assert store.get(manifest.weights.key) == data
    assert (manifest.round, manifest.base_rounds, manifest.tokens_total) == (0, (0,), 0)


def test_the_checkpoint_lies_there_before_the_group(world: Any) -> None:
    """Replicas that come as soon as there is a group must not write weights of their own."""
    with_checkpoint(world, 0, 1)
    fork = submit(clone_and_fork.fork_of(world.run, 1), world)
    world.bucket.store.delete([f"{keys.checkpoint_dir(1, 0, w.incarnation(0))}weights.safetensors"])
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
        ({"fork": Fork(run=uuid.UUID(int=1), round=1)}, "fork_round", "it is gone"),
        ({"round": 7}, "fork_round", r"kept \(1, 0\), found round 7"),
        ({"workload": ByteGPTWorkload(size="mini")}, "size", "expected 'demo' .* found 'mini'"),
        ({"num_fragments": 2}, "num_fragments", "expected 1 as in 'Test run'"),
    ],
)
def test_what_a_fork_cannot_do_is_said_at_its_field(
    world: Any, changes: dict[str, Any], field: str, message: str
) -> None:
    with_checkpoint(world, 0, 1)
    draft = clone_and_fork.fork_of(world.run, changes.pop("round", 1))
    if fragments := changes.pop("num_fragments", None):
        settings = dataclasses.replace(draft.settings, num_fragments=fragments)
        changes["settings"] = settings
        without = dataclasses.replace(draft, settings=settings, name="without outer state")
        submit(
            dataclasses.replace(without, fork=dataclasses.replace(draft.fork, outer=False)), world
        )
    with pytest.raises(InvalidRun, match=message) as error:
        submit(dataclasses.replace(draft, **changes), world)
    assert error.value.field == field


def test_a_fork_whose_origin_is_deleted_says_so(world: Any) -> None:
    with_checkpoint(world, 0, 1)
    fork = submit(clone_and_fork.fork_of(world.run, 1), world)
    Run.objects.filter(pk=world.run.pk).delete()
    launch_run(str(fork.pk))
    fork.refresh_from_db()
    assert fork.state == "failed"
    assert "found that it is gone" in fork.state_reason
