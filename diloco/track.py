"""``python -m diloco.track URI``: mirror a run without a server to an experiment tracker.

    python -m diloco.track s3://bucket/run --to tensorboard --server "$PWD/logs" --follow
    python -m diloco.track s3://bucket/run --to mlflow --server http://127.0.0.1:5000 \\
        --project islands --state mirror.json --follow

Reads the telemetry of all replicas from the bucket and writes nothing there. Secrets come from the
environment variables of the tracker, such as ``WANDB_API_KEY``. The state file has the position of
this mirror; with it, an interrupted command continues and each point is delivered once. Exit
status: 1 if the store or the tracker failed, 2 for an invalid option or if there is no run. """

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.clock import Clock, SystemClock
from diloco.command_line import add_common_options
from diloco.error_lines import print_error
from diloco.inspection.reader import Reader
from diloco.inspection.reading import NotARun, read_document
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.packed_telemetry import next_segment
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import Segment
from diloco.store.base import Store, StoreDenied, StoreError, exists
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore
from diloco.trackers.base import BATCH_VALUES, MirroredRun, Tracker, TrackerError, TrackerRow
from diloco.trackers.opening import KINDS, Destination, open_tracker

SERIES = ("loss", "lr", "grad_norm", "step_s")
"""Series of each step of a replica, besides the system metrics of each segment."""
SEGMENTS = 8
"""Segments of one process that are read at once."""
PAUSE_S = 10.0
PATIENCE_S = 60.0
THREADS = 16


@dataclass
class MirrorState:
    """Position of a mirror, as stored in its file.

    Attributes:
        cursors: ``<replica>/<incarnation>`` -> number of the next segment.
        positions: ``<owner>/<series>`` -> largest step delivered, so that a process that repeats
            steps of its predecessor adds nothing.
        number: number of the next row.
        pending: rows that are being delivered, with the cursors and positions after them.
        remote: state of the tracker's client.
    """

    cursors: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    number: int = 0
    pending: dict[str, Any] | None = None
    remote: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    ended: bool = False

    @classmethod
    def read(cls, path: Path) -> MirrorState:
        """Raises ``ValueError`` if the file holds something else."""
        if not path.exists():
            return cls()
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise ValueError(f"{path} is no state of a mirror") from None

    def write(self, path: Path) -> None:
        """Replace the file at once, so that a killed process leaves the old or the new one."""
        new = path.with_name(f".{path.name}.new")
        with new.open("w") as file:
            json.dump(self.__dict__, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


@dataclass(kw_only=True)
class BucketMirror:
    """Delivers the telemetry of a run to a tracker."""

    store: Store
    run: MirroredRun
    tracker: Tracker
    state: MirrorState
    path: Path
    _listed: set[str] = field(default_factory=set)

    def deliver(self) -> int:
        """Deliver everything that is new. Returns the number of rows."""
        if not self.state.started:
            self.state.remote = self.tracker.start(self.run, {})
            self.state.started = True
            self.state.write(self.path)
        count = 0
        with ThreadPoolExecutor(THREADS) as pool:
            reader = Reader(self.store, pool)
            while self.state.pending is not None or self._prepare(reader):
                count += self._deliver_pending()
        return count

    def finish(self) -> None:
        """Report the end of the run to the tracker."""
        if not self.state.ended:
            self.state.remote = self.tracker.finish(self.run, "succeeded", self.state.remote)
            self.state.ended = True
            self.state.write(self.path)

    def _deliver_pending(self) -> int:
        assert self.state.pending is not None
        pending = self.state.pending
        rows = [TrackerRow.from_dict(body) for body in pending["rows"]]
        for first in range(0, len(rows), BATCH_VALUES // len(SERIES)):
            part = rows[first : first + BATCH_VALUES // len(SERIES)]
            self.state.remote = self.tracker.log(self.run, part, self.state.remote)
        self.state.number += len(rows)
        self.state.cursors, self.state.positions = pending["cursors"], pending["positions"]
        self.state.pending = None
        self.state.write(self.path)
        return len(rows)

    def _prepare(self, reader: Reader) -> bool:
        """Read the next segments and store their rows as pending. False if there are none."""
        for name in self._processes():
            cursor = self.state.cursors.get(name, 1)
            segments = self._read(reader, name, cursor)
            if not segments and (following := self._after_deleted(name, cursor)):
                cursor = following
                segments = self._read(reader, name, cursor)
            if not segments:
                continue
            positions = dict(self.state.positions)
            rows: list[TrackerRow] = []
            for segment in segments:
                rows += _rows_of(segment, positions, self.state.number + len(rows))
            self.state.pending = {
                "rows": [row.to_dict() for row in rows],
                "cursors": {**self.state.cursors, name: cursor + len(segments)},
                "positions": positions,
            }
            self.state.write(self.path)
            return True
        return False

    def _after_deleted(self, name: str, cursor: int) -> int:
        """Return the number of the next segment, if those from ``cursor`` on were deleted while no
        mirror was running: looked up once for each process. 0 without one."""
        if name in self._listed:
            return 0
        self._listed.add(name)
        replica, _, incarnation = name.partition("/")
        return next_segment(self.store, int(replica), incarnation, cursor)

    def _processes(self) -> list[str]:
        """``<replica>/<incarnation>`` of all processes that had a lease, oldest first."""
        found = set()
        for info in self.store.list(keys.MEMBERS):
            _, replica, name, *_ = (*info.key.split("/"), "", "")
            incarnation = name.removesuffix(".json")
            if replica.isdecimal() and keys.is_incarnation(incarnation):
                found.add(f"{replica}/{incarnation}")
        return sorted(found)

    def _read(self, reader: Reader, name: str, cursor: int) -> list[Segment]:
        replica, _, incarnation = name.partition("/")
        identity = Identity(replica=int(replica), incarnation=incarnation)
        wanted = [(identity, n) for n in range(cursor, cursor + SEGMENTS)]
        result: list[Segment] = []
        for (_, n), segment in zip(wanted, reader.read_segments(wanted), strict=True):
            key = keys.telemetry(identity.replica, identity.incarnation, n)
            if segment is None and any(each.key == key for each in reader.unreadable):
                segment = Segment(
                    replica=identity.replica, incarnation=incarnation, n=n,
                    wall_s=0.0, state="", round=0,
                )  # fmt: skip
                print(f"diloco.track: {key} is damaged and left out", file=sys.stderr)
            if segment is None:
                break
            result.append(segment)
        return result


def _rows_of(segment: Segment, positions: dict[str, int], number: int) -> list[TrackerRow]:
    """Rows of a segment's steps and evaluations beyond ``positions``, which are advanced."""
    rows: list[TrackerRow] = []

    def add(owner: str, step: int, wall_s: float, values: dict[str, float]) -> None:
        new = {n: v for n, v in values.items() if step > positions.get(f"{owner}/{n}", -1)}
        positions.update({f"{owner}/{name}": step for name in new})
        if new:
            rows.append(
                TrackerRow(
                    number=number + len(rows), owner=owner, step=step, wall_s=wall_s, values=new
                )
            )

    owner, steps = f"replica/{segment.replica}", segment.steps
    columns = {name: column for name in SERIES if (column := getattr(steps, name))}
    for index, step in enumerate(steps.step):
        values = {name: float(column[index]) for name, column in columns.items()}
        add(owner, step, steps.wall_s[index], values)
    if segment.system and steps.step:
        metrics = {name: float(value) for name, value in segment.system.items()}
        add(owner, steps.step[-1], segment.wall_s, metrics)
    for evaluation in segment.evaluations:
        add("", evaluation.round, evaluation.wall_s, {"eval_loss": evaluation.loss})
    return rows


def _described(document: GroupDocument, uri: str) -> MirroredRun:
    settings = document.settings.to_dict()
    return MirroredRun(
        id=document.fingerprint[:32],
        name=uri.rstrip("/").rsplit("/", 1)[-1],
        started_s=0.0,
        config={**{f"settings.{name}": value for name, value in settings.items()}, "uri": uri},
    )


def _server_of(kind: str) -> str:
    """The server that the tracker's own library would use."""
    return os.environ.get("WANDB_BASE_URL", "") if kind == "wandb" else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.track",
        description="Mirror the metrics of a run to an experiment tracker.",
    )
    add_common_options(parser)
    parser.add_argument("uri", help="rendezvous URI of the run, or its folder")
    parser.add_argument("--to", required=True, choices=sorted(KINDS), metavar="KIND", dest="kind")
    parser.add_argument("--server", default="", help="address of the tracker, or its folder")
    parser.add_argument("--project", default="", help="project or experiment")
    parser.add_argument(
        "--state", type=Path, default=Path("mirror.json"), help="file with the position"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the run has ended")
    return parser


def main(argv: Sequence[str] | None = None, *, clock: Clock | None = None) -> int:
    options = _parser().parse_args(argv)
    clock = clock or SystemClock()
    try:
        server = options.server or _server_of(options.kind)
        target = Destination(kind=options.kind, server=server, project=options.project)
        state = MirrorState.read(options.state)
        store = RetryingStore(
            open_store(options.uri), clock=clock, rng=random.Random(0), deadline_s=PATIENCE_S
        )
        secrets = {n: os.environ[n] for n in KINDS[options.kind].secrets if n in os.environ}
        folder = options.state.absolute().parent / "trackers"
        mirror = BucketMirror(
            store=store,
            run=_described(read_document(store), options.uri),
            tracker=open_tracker(target, folder=folder, secrets=secrets),
            state=state,
            path=options.state,
        )
        while True:
            ended = exists(store, keys.FINAL_MANIFEST)  # before the last telemetry is read
            print(f"{mirror.deliver()} rows delivered, {state.number} in all", flush=True)
            if ended:
                mirror.finish()
            if ended or not options.follow:
                return 0
            clock.sleep(PAUSE_S)
    except KeyboardInterrupt:
        return 130
    except (NotARun, StoreDenied, ValueError) as error:
        print_error(error, uri=options.uri, verbose=options.verbose)
        return 2
    except (StoreError, TrackerError) as error:
        print_error(error, uri=options.uri, verbose=options.verbose)
        return 1


if __name__ == "__main__":
    sys.exit(main())
