"""TensorBoard event files, written with the library's own record writer.

The state has the size of the file after the last delivered batch. A batch that is repeated first
cuts the file to that size, so each row is in the file once, whatever a killed process left behind.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.trackers.base import MirroredRun, Outcome, TrackerError, TrackerRow

_VERSION = "brain.Event:2"
"""First event of each file (tensorboard/compat/proto/event.proto)."""


class TensorBoardTracker:
    """One folder below ``logdir`` for each run, with one event file.

    Args:
        logdir: an existing or new folder of this machine.
    """

    def __init__(self, logdir: str) -> None:
        self._logdir = Path(logdir)

    def start(self, run: MirroredRun, state: dict[str, Any]) -> dict[str, Any]:
        try:
            path = self._path(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise TrackerError(f"can't write to {self._logdir}: {error.strerror}") from None
        event_pb2, _, _ = _library()
        first = event_pb2.Event(wall_time=run.started_s, file_version=_VERSION)
        return {"size": self._append(run, [first], 0), "folder": str(path.parent)}

    def log(
        self, run: MirroredRun, rows: Sequence[TrackerRow], state: dict[str, Any]
    ) -> dict[str, Any]:
        event_pb2, summary_pb2, _ = _library()
        events = [
            event_pb2.Event(
                wall_time=row.wall_s,
                step=row.step,
                summary=summary_pb2.Summary(
                    value=[
                        summary_pb2.Summary.Value(tag=name, simple_value=value)
                        for name, value in row.named_values().items()
                    ]
                ),
            )
            for row in rows
        ]
        return {**state, "size": self._append(run, events, int(state["size"]))}

    def finish(self, run: MirroredRun, outcome: Outcome, state: dict[str, Any]) -> dict[str, Any]:
        """Nothing: an event file has no end."""
        return state

    def url(self, state: Mapping[str, Any]) -> str:
        return ""

    def _path(self, run: MirroredRun) -> Path:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.") or "run"
        seconds = int(run.started_s)
        return self._logdir / f"{name}-{run.id[:8]}" / f"events.out.tfevents.{seconds}.archipelago"

    def _append(self, run: MirroredRun, events: Sequence[Any], size: int) -> int:
        _, _, writer_type = _library()
        try:
            with self._path(run).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if file.seek(0, os.SEEK_END) < size:
                    raise TrackerError(f"{file.name} is shorter than what was written to it")
                file.truncate(size)
                file.seek(size)
                writer = writer_type(file)
                for event in events:
                    writer.write(event.SerializeToString(deterministic=True))
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            raise TrackerError(f"can't write to {self._logdir}: {error.strerror}") from None


def _library() -> tuple[Any, Any, Any]:
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise TrackerError(
            'TensorBoard files need a package: pip install "archipelago-diloco[tensorboard]"'
        ) from None
    return event_pb2, summary_pb2, RecordWriter
