"""Segments of a broken or hostile replica never stop the ingest of other records."""

from __future__ import annotations

import json
import math

import pytest

from diloco.protocol import keys
from diloco.protocol.telemetry import StepColumns
from runs.ingest.telemetry import SEGMENT_LIMIT
from runs.ingest.validation import REFUSAL_EVENTS
from runs.models import Event, LogLine
from runs.queries import selectors
from tests.matrix import matrix
from tests.runs.ingest_harness import IngestHarness
from tests.runs.run_harness import incarnation

pytestmark = pytest.mark.django_db


def broken(ingest: IngestHarness, name: str) -> bytes:
    good = json.loads(ingest.bucket.segment(0, 1, losses=[5.0]))
    match name:
        case "not json":
            return b"\x00\xff"
        case "empty":
            return b""
        case "another version":
            good["v"] = 99
        case "another replica's":
            good["replica"] = 1
        case "another number":
            good["n"] = 7
        case "uneven columns":
            good["steps"]["tokens"] = []
        case "uneven series":
            good["steps"]["lr"] = [1.0, 2.0]
        case "step below zero":
            good["steps"]["step"] = [-1]
        case "tokens beyond any training":
            good["steps"]["tokens"] = [2**63]
        case "round beyond the column":
            good["steps"]["round"] = [2**31]
        case "text for a number":
            good["steps"]["loss"] = ["low"]
        case "evaluation of round -1":
            good["evaluations"] = [{"round": -1, "loss": 1.0, "tokens": 0, "wall_s": 0.0}]
        case "time that is none":
            good["steps"]["wall_s"] = [math.nan]
        case "evaluation at no time":
            good["evaluations"] = [{"round": 1, "loss": 1.0, "tokens": 0, "wall_s": math.inf}]
        case "endless nesting":
            return b'{"v":' + b"[" * 100_000
        case "endless":
            return json.dumps(good).encode().ljust(SEGMENT_LIMIT + 1)
    return json.dumps(good).encode()


BROKEN = (
    "not json",
    "empty",
    "another version",
    "another replica's",
    "another number",
    "uneven columns",
    "uneven series",
    "step below zero",
    "tokens beyond any training",
    "round beyond the column",
    "text for a number",
    "evaluation of round -1",
    "time that is none",
    "evaluation at no time",
    "endless nesting",
    "endless",
)


@matrix(
    "name",
    BROKEN,
    fast=("another replica's", "tokens beyond any training", "round beyond the column", "endless"),
)
def test_an_invalid_segment_is_reported_and_skipped(ingest: IngestHarness, name: str) -> None:
    key = keys.telemetry(0, incarnation(0), 1)
    ingest.bucket.store.put(key, broken(ingest, name))
    ingest.bucket.segment(0, 2, losses=[4.0], first=2)
    ingest.ingest()
    assert ingest.loss() == [4.0]
    [event] = Event.objects.filter(kind="refused")
    assert event.message.startswith(f"{key} refused: ")
    assert (event.level, event.replica.number) == ("warning", 0)
    cursor = ingest.cursor()
    assert (cursor.next_n, cursor.refused, ingest.run.refused_records) == (3, 1, 1)


def test_many_invalid_segments_are_counted_but_not_all_reported(ingest: IngestHarness) -> None:
    for n in range(1, REFUSAL_EVENTS + 11):
        ingest.bucket.store.put(keys.telemetry(0, incarnation(0), n), b"{}")
    ingest.ingest()
    assert ingest.run.refused_records == REFUSAL_EVENTS + 10
    assert Event.objects.filter(kind="refused").count() == REFUSAL_EVENTS


def test_unknown_fields_of_newer_replicas_are_ignored(ingest: IngestHarness) -> None:
    """During a rolling upgrade an old server reads segments of newer code."""
    reported = json.loads(
        ingest.bucket.segment(0, 1, losses=[5.0], rounds=[ingest.bucket.report(1)])
    )
    reported["colour"] = reported["steps"]["shade"] = reported["rounds"][0]["tint"] = ["red"]
    ingest.bucket.store.put(keys.telemetry(0, incarnation(0), 1), json.dumps(reported).encode())
    ingest.ingest()
    assert ingest.loss() == [5.0]
    assert ingest.run.rounds.count() == 1
    assert not Event.objects.filter(kind="refused")


def test_series_can_be_missing(ingest: IngestHarness) -> None:
    steps = StepColumns(step=(1,), round=(1,), wall_s=(1e9,), tokens=(10,), lr=(0.1,))
    ingest.bucket.segment(0, 1, steps=steps)
    ingest.bucket.segment(1, 1, losses=[5.0])
    ingest.ingest()
    assert selectors.series_of(ingest.run) == [("loss", 1), ("lr", 0), ("lr", 1)]
    assert ingest.run.replicas.get(number=0).loss is None


@pytest.mark.parametrize("text", ["nul \x00 inside", "half a pair \ud800", "x" * 100_000])
def test_text_that_no_database_accepts_is_cleaned(ingest: IngestHarness, text: str) -> None:
    line = ingest.bucket.log(text)
    report = ingest.bucket.report(1, weights_digest=text, outcome=text)
    ingest.bucket.segment(0, 1, losses=[5.0], logs=(line,), rounds=(report,))
    ingest.ingest()
    stored = LogLine.objects.get().message
    assert "\x00" not in stored
    assert len(stored.encode()) <= 20_000
    assert "\x00" not in ingest.run.rounds.get().weights_digest
    assert ingest.loss() == [5.0]
    json.dumps(selectors.round_rows(ingest.run)).encode()


def test_times_outside_the_calendar_are_replaced_by_the_server_s(ingest: IngestHarness) -> None:
    report = ingest.bucket.report(1, started_wall_s=1e300, committed_wall_s=math.nan)
    ingest.bucket.segment(0, 1, rounds=(report,))
    ingest.ingest()
    contribution = ingest.run.rounds.get().contributions.get()
    assert contribution.started_at == contribution.committed_at == ingest.clock()
