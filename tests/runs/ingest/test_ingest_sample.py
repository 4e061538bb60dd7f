"""The sample of text beside the final weights: read once, as it comes, whatever is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import FinalManifest, FinalSample
from runs.ingest.checkpoints import SAMPLE_LETTERS, SAMPLE_LIMIT
from runs.models import Checkpoint, Run
from runs.restore.import_run import import_run

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=2)
    made.start()
    return made


def put(world: Any, data: bytes | None = None, **changes: Any) -> None:
    """Beside the result that the bucket's manifest names."""
    manifest = FinalManifest.from_bytes(world.bucket.store.get(keys.FINAL_MANIFEST))
    values = {
        "round": manifest.round, "prompt": "def ", "text": "f(x):\n\treturn x", "temperature": 0.7,
        "seed": 0, "whole": True, "wall_s": 1e9, **changes,
    }  # fmt: skip
    writer = manifest.writer
    key = keys.final_sample(writer.replica, writer.incarnation)
    world.bucket.store.put(key, data or FinalSample(**values).to_bytes())


def stored() -> Any:
    return Checkpoint.objects.get(final=True).sample


def test_it_may_come_after_the_end(world: Any) -> None:
    world.bucket.final(2)
    world.tick()
    assert world.run.state == "succeeded" and stored() is None
    put(world)
    world.tick()
    assert stored() == {
        "round": 2, "prompt": "def ", "text": "f(x):\n\treturn x", "temperature": 0.7, "seed": 0,
        "whole": True,
    }  # fmt: skip


def test_the_first_that_was_read_stays(world: Any) -> None:
    world.bucket.final(2)
    put(world, text="one")
    world.tick()
    put(world, text="two")
    world.tick()
    assert stored()["text"] == "one"


def test_text_is_stored_as_any_database_takes_it_and_not_without_end(world: Any) -> None:
    world.bucket.final(2)
    put(world, text="\x00\ud800\x1b[2J<b>\n\t" + "x" * 9000, temperature=float("nan"))
    world.tick()
    found = stored()
    assert found["text"].startswith("\ufffd?\ufffd[2J<b>\n\tx")
    assert len(found["text"]) == SAMPLE_LETTERS and found["temperature"] is None


@pytest.mark.parametrize(
    ("data", "changes"),
    [(b"{}", {}), (b"[" * 100_000, {}), (None, {"text": "x" * SAMPLE_LIMIT}), (None, {"round": 1}),
     (None, {"seed": -1})],
    ids=["fields", "nested", "large", "round", "seed"],
)  # fmt: skip
def test_one_that_is_not_what_it_should_be_is_refused_by_name(
    world: Any, data: bytes | None, changes: dict[str, Any]
) -> None:
    world.bucket.final(2)
    put(world, data, **changes)
    for _ in range(2):
        world.tick()
    assert world.run.state == "succeeded" and stored() is None
    [told] = world.events("refused")
    assert told.startswith(keys.final_sample(0, "")[:12]) and "sample.json refused: " in told


def test_a_writer_without_a_name_of_its_own_is_not_looked_for(world: Any) -> None:
    world.bucket.final(2)
    manifest = FinalManifest.from_bytes(world.bucket.store.get(keys.FINAL_MANIFEST))
    named = replace(manifest, writer=replace(manifest.writer, incarnation="../../etc"))
    world.bucket.store.put(keys.FINAL_MANIFEST, named.to_bytes())
    world.tick()
    assert world.run.state == "succeeded" and stored() is None


def test_an_import_reads_it_again(world: Any) -> None:
    world.bucket.final(2)
    put(world)
    world.tick()
    before = stored()
    rendezvous, owner = world.run.rendezvous, world.run.owner
    Run.objects.all().delete()
    import_run(rendezvous, owner=owner)
    assert stored() == before
