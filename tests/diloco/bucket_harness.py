"""A bucket built record by record, for tests that read it."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

from diloco.init import create_group
from diloco.inspect import inspect
from diloco.inspection.picture import Picture
from diloco.protocol import keys
from diloco.protocol.records import (
    CheckpointManifest,
    Commit,
    ContributionRecord,
    FinalManifest,
    Heartbeat,
    Identity,
    Plan,
    PlannedContribution,
    Record,
    StoredObject,
)
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import RoundReport, Segment
from diloco.store.base import Store
from tests.diloco.clocks import ManualClock

T = TypeVar("T")
EMPTY: dict[type, Any] = {int: 0, float: 0.0, str: "", bool: False}


def filled(kind: type[T], **values: Any) -> T:
    """A record with ``values`` and defaults in all other fields."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and field.name not in values:
            hint = hints[field.name]
            is_tuple = typing.get_origin(hint) is tuple
            values[field.name] = () if is_tuple else EMPTY.get(hint, {})
    return kind(**values)


def who(replica: int, seq: int = 1) -> Identity:
    return Identity(replica=replica, incarnation=f"{seq:05d}-{replica:08x}")


class Harness:
    """A bucket with the objects of replicas, added one at a time."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.store = store
        chosen = {"num_replicas": 3, "total_rounds": 50, "warmup_steps": 0, **settings}
        self.document = create_group(store.uri, GroupSettings(**chosen), name="world")

    def put(self, key: str, record: Record) -> None:
        self.store.put(key, record.to_bytes())

    def beat(self, replica: int, *, seq: int = 1, **values: Any) -> None:
        chosen = {"state": "computing", "interval_s": 2.0, "count": 1, **values}
        beat = filled(
            Heartbeat, replica=replica, incarnation=who(replica, seq).incarnation, **chosen
        )
        self.put(keys.beat(replica, beat.incarnation), beat)

    def contribute(
        self, round: int, *replicas: int, seq: int = 1, tokens: int = 100, payload: bool = True
    ) -> None:
        for replica in replicas:
            where = (round, replica, who(replica, seq).incarnation)
            if payload:
                self.store.put(keys.contribution_payload(*where), bytes(1000))
            record = filled(
                ContributionRecord,
                round=round,
                replica=replica,
                incarnation=where[2],
                tokens=tokens,
                steps=10,
            )
            self.put(keys.contribution_record(*where), record)

    def plan(self, round: int, *replicas: int, **values: Any) -> None:
        planned = tuple(
            filled(
                PlannedContribution,
                replica=replica,
                incarnation=who(replica).incarnation,
                size_bytes=1000,
                new_tokens=100,
            )
            for replica in replicas
        )
        chosen = {"mode": "gather", "planner": who(replicas[0]), **values}
        self.put(keys.plan(round), filled(Plan, round=round, contributions=planned, **chosen))

    def commit(self, round: int, *replicas: int, **values: Any) -> None:
        chosen = {
            "committer": who(replicas[0]),
            "loss": 2.0,
            "void": "",
            "committed_total": round,
            "tokens_total": 300 * round,
            **values,
        }
        contributors = tuple(who(replica) for replica in replicas)
        self.put(
            keys.commit(round), filled(Commit, round=round, contributors=contributors, **chosen)
        )

    def round(self, round: int, *replicas: int, **values: Any) -> None:
        """A committed round."""
        self.contribute(round, *replicas)
        self.plan(round, *replicas)
        self.commit(round, *replicas, **values)

    def report(
        self, replica: int, n: int, round: int, *reports: dict[str, Any], **values: Any
    ) -> None:
        segment = filled(
            Segment,
            replica=replica,
            incarnation=who(replica).incarnation,
            n=n,
            round=round,
            rounds=tuple(filled(RoundReport, **{"outcome": "included", **r}) for r in reports),
            **values,
        )
        self.put(keys.telemetry(replica, segment.incarnation, n), segment)

    def checkpoint(self, round: int, *, without: str = "") -> None:
        folder = keys.checkpoint_dir(round, 0, who(0).incarnation)
        stored = {
            name: StoredObject(key=f"{folder}{name}.safetensors", size_bytes=500, sha256="0")
            for name in ("weights", "outer")
        }
        for name, described in stored.items():
            if name != without:
                self.store.put(described.key, bytes(500))
        manifest = filled(CheckpointManifest, round=round, writer=who(0), **stored)
        self.put(keys.checkpoint_manifest(round), manifest)

    def finish(self, round: int) -> None:
        stored = {
            name: StoredObject(key=f"final/x/{name}", size_bytes=500, sha256="0")
            for name in ("weights", "config", "summary")
        }
        for described in stored.values():
            self.store.put(described.key, bytes(500))
        final = filled(FinalManifest, round=round, writer=who(0), reason="completed", **stored)
        self.put(keys.FINAL_MANIFEST, final)


def picture_of(harness: Harness, *beating: int, **options: Any) -> Picture:
    """Return the picture if the ``beating`` replicas write heartbeats between the two reads."""

    def meanwhile() -> None:
        for lease in list(harness.store.list(keys.MEMBERS)):
            parsed = keys.parse_beat(lease.key)
            if parsed is not None and parsed[0] in beating:
                beat = Heartbeat.from_bytes(harness.store.get(lease.key))
                harness.put(lease.key, dataclasses.replace(beat, count=beat.count + 1))

    return inspect(harness.store, clock=ManualClock(meanwhile), **options)
