"""The text sample next to the final weights: stored once, with any content."""

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
MakeHarness = Callable[..., Any]


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def put(harness: Any, data: bytes | None = None, **changes: Any) -> None:
    """Write the sample next to the result that the manifest names."""
    manifest = FinalManifest.from_bytes(harness.bucket.store.get(keys.FINAL_MANIFEST))
    values = {
        "round": manifest.round,
        "prompt": "def ",
        "text": "f(x):\n\treturn x",
        "temperature": 0.7,
        "seed": 0,
        "whole": True,
        "wall_s": 1e9,
        **changes,
    }
    writer = manifest.writer
    key = keys.final_sample(writer.replica, writer.incarnation)
    harness.bucket.store.put(key, data or FinalSample(**values).to_bytes())


def stored() -> Any:
    return Checkpoint.objects.get(final=True).sample


def test_a_sample_written_after_the_end_is_read(harness: Any) -> None:
    harness.bucket.final(2)
    harness.tick()
    assert harness.run.state == "succeeded" and stored() is None
    put(harness)
    harness.tick()
    assert stored() == {
        "round": 2,
        "prompt": "def ",
        "text": "f(x):\n\treturn x",
        "temperature": 0.7,
        "seed": 0,
        "whole": True,
    }


def test_the_first_sample_is_kept(harness: Any) -> None:
    harness.bucket.final(2)
    put(harness, text="one")
    harness.tick()
    put(harness, text="two")
    harness.tick()
    assert stored()["text"] == "one"


def test_sample_text_is_cleaned_and_truncated(harness: Any) -> None:
    harness.bucket.final(2)
    put(harness, text="\x00\ud800\x1b[2J<b>\n\t" + "x" * 9000, temperature=float("nan"))
    harness.tick()
    result = stored()
    assert result["text"].startswith("\ufffd?\ufffd[2J<b>\n\tx")
    assert len(result["text"]) == SAMPLE_LETTERS and result["temperature"] is None


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (b"{}", {}),
        (b"[" * 100_000, {}),
        (None, {"text": "x" * SAMPLE_LIMIT}),
        (None, {"round": 1}),
        (None, {"seed": -1}),
    ],
    ids=["fields", "nested", "large", "round", "seed"],
)
def test_an_invalid_sample_is_refused_with_its_key(
    harness: Any, data: bytes | None, changes: dict[str, Any]
) -> None:
    harness.bucket.final(2)
    put(harness, data, **changes)
    for _ in range(2):
        harness.tick()
    assert harness.run.state == "succeeded" and stored() is None
    [reported] = harness.events("refused")
    assert (
        reported.startswith(keys.final_sample(0, "")[:12]) and "sample.json refused: " in reported
    )


def test_a_writer_without_an_incarnation_is_ignored(harness: Any) -> None:
    harness.bucket.final(2)
    manifest = FinalManifest.from_bytes(harness.bucket.store.get(keys.FINAL_MANIFEST))
    named = replace(manifest, writer=replace(manifest.writer, incarnation="../../etc"))
    harness.bucket.store.put(keys.FINAL_MANIFEST, named.to_bytes())
    harness.tick()
    assert harness.run.state == "succeeded" and stored() is None


def test_an_import_reads_the_sample_again(harness: Any) -> None:
    harness.bucket.final(2)
    put(harness)
    harness.tick()
    before = stored()
    rendezvous, owner = harness.run.rendezvous, harness.run.owner
    Run.objects.all().delete()
    import_run(rendezvous, owner=owner)
    assert stored() == before
