"""Telemetry: buffer a replica's metrics and write them in append-only segments.

Losses can be tensors on a GPU. They are copied to the host together when a segment is created, so
that telemetry does not synchronise the device at every step. A segment that cannot be written is
kept and retried under the same number; data is lost only if the process dies.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from diloco.clock import Clock
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import (
    MAX_EVALUATIONS,
    MAX_LOGS,
    MAX_ROUNDS,
    MAX_STEPS,
    Evaluation,
    LogLine,
    RoundReport,
    Segment,
    StepColumns,
)
from diloco.store.base import Store, StoreError
from diloco.telemetry.compaction import Compaction
from diloco.telemetry.system_metrics import Usage

Number = float | torch.Tensor
STEPS = MAX_STEPS // 2
ROWS = min(MAX_ROUNDS, MAX_EVALUATIONS) // 2
FIRST_INTERVAL_S = 2.0
"""Seconds to the first segment, so that a page shows a new process soon."""


@dataclass
class SegmentBuffer:
    """Rows of a segment that is not written yet."""

    step: list[int] = field(default_factory=list)
    round: list[int] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    loss: list[Number] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    grad_norm: list[Number] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    rounds: list[RoundReport] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)


class TelemetryWriter:
    """Writes a segment every ``interval_s`` seconds if there are new rows.

    The first one is written after :data:`FIRST_INTERVAL_S`, and the time between two segments
    doubles up to ``interval_s``: a run of a minute is shown live, and one of days does not pay for
    an object every few seconds.
    """

    MAX_LOGS = 1000
    """Maximum log lines of a segment. The oldest are dropped, and one line reports how many."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        clock: Clock,
        interval_s: float,
        packs_kept: int = 0,
    ) -> None:
        self._store = store
        self._identity = identity
        self._clock = clock
        self._interval_s = interval_s
        self._usage = Usage(clock)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._pending = SegmentBuffer()
        self._dropped_logs = 0
        self._n = 1
        self._unwritten: Segment | None = None
        self._queue: deque[tuple[SegmentBuffer, bool]] = deque()
        self._state = "syncing"
        self._steps, self._tokens = 0, 0
        self._round = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._handler = _LogHandler(self)
        self._compaction = Compaction(
            store, identity, is_over=self._ended.is_set, packs_kept=packs_kept
        )

    def start(self) -> None:
        """Start the thread, and record the log lines of the ``diloco`` loggers."""
        logging.getLogger("diloco").addHandler(self._handler)
        self._thread.start()

    def phase(self, *, state: str, round: int) -> None:
        """Set the state and round that the next segment reports."""
        self._state, self._round = state, round

    def step(
        self,
        *,
        step: int,
        round: int,
        tokens: int,
        loss: Number,
        lr: float,
        grad_norm: Number,
        step_s: float,
    ) -> None:
        """Add one inner step. ``loss`` is in nats per token, ``step_s`` in seconds."""
        with self._lock:
            p = self._pending
            self._steps, self._tokens = step, tokens
            p.step.append(step)
            p.round.append(round)
            p.wall_s.append(self._clock.wall())
            p.tokens.append(tokens)
            p.loss.append(loss)
            p.lr.append(lr)
            p.grad_norm.append(grad_norm)
            p.step_s.append(step_s)

    def round(self, report: RoundReport) -> None:
        """Add a round report; its step and tokens are those of the last step added."""
        with self._lock:
            report = replace(report, step=self._steps, tokens=self._tokens)
            self._pending.rounds.append(report)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Add the result of an evaluation."""
        with self._lock:
            self._pending.evaluations.append(evaluation)

    def log(self, level: str, message: str) -> None:
        """Add a log line of at most 4000 characters."""
        with self._lock:
            logs = self._pending.logs
            logs.append(LogLine(wall_s=self._clock.wall(), level=level, message=message[:4000]))
            if len(logs) > self.MAX_LOGS:
                self._dropped_logs += 1
                del logs[0]

    def flush(self, *, last: bool = False) -> None:
        """Write all buffered rows. If this raises :class:`StoreError`, the rows are kept."""
        with self._flushing:
            if self._unwritten is not None:
                self._write(self._unwritten)
            with self._lock:
                pending, self._pending = self._pending, SegmentBuffer()
                dropped, self._dropped_logs = self._dropped_logs, 0
            if dropped:
                line = f"{dropped} older log lines were dropped"
                pending.logs.insert(
                    0, LogLine(wall_s=self._clock.wall(), level="WARNING", message=line)
                )
            parts = _split(pending)
            if last or pending.step or pending.rounds or pending.evaluations or pending.logs:
                self._queue += [(part, last and part is parts[-1]) for part in parts]
            while self._queue:
                part, is_last = self._queue.popleft()
                self._write(self._segment(part, last=is_last))

    def end(self) -> None:
        """Write the last segment and stop the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        logging.getLogger("diloco").removeHandler(self._handler)
        self.flush(last=True)

    def _write(self, segment: Segment) -> None:
        self._unwritten = segment
        key = keys.telemetry(segment.replica, segment.incarnation, segment.n)
        self._store.put(key, segment.to_bytes())
        self._unwritten = None
        self._n += 1

    def _segment(self, p: SegmentBuffer, *, last: bool) -> Segment:
        return Segment(
            replica=self._identity.replica,
            incarnation=self._identity.incarnation,
            n=self._n,
            wall_s=self._clock.wall(),
            state=self._state,
            round=self._round,
            steps=StepColumns(
                step=tuple(p.step),
                round=tuple(p.round),
                wall_s=tuple(p.wall_s),
                tokens=tuple(p.tokens),
                loss=_numbers(p.loss),
                lr=tuple(p.lr),
                grad_norm=_numbers(p.grad_norm),
                step_s=tuple(p.step_s),
            ),
            rounds=tuple(p.rounds),
            evaluations=tuple(p.evaluations),
            logs=tuple(p.logs),
            system=self._usage.read(),
            last=last,
        )

    def _run(self) -> None:
        interval_s = min(FIRST_INTERVAL_S, self._interval_s)
        while not self._ended.wait(interval_s):
            interval_s = min(self._interval_s, 2 * interval_s)
            try:
                self.flush()
                self._compaction.run(self._n - 1)
            except StoreError as error:
                # Not logged: each failed attempt would add a log line to the next segment.
                print(f"telemetry failed, will try again: {error}", file=sys.stderr, flush=True)


def _split(pending: SegmentBuffer) -> list[SegmentBuffer]:
    """Split into one or more parts of at most half a segment's limits: after an outage of the
    store, hours of steps can be pending."""
    columns = ("step", "round", "wall_s", "tokens", "loss", "lr", "grad_norm", "step_s")
    parts = [
        SegmentBuffer(**{name: getattr(pending, name)[start : start + STEPS] for name in columns})
        for start in range(0, len(pending.step), STEPS)
    ]
    for name, chunks in (
        ("rounds", _chunks(pending.rounds, ROWS)),
        ("evaluations", _chunks(pending.evaluations, ROWS)),
        ("logs", _log_chunks(pending.logs)),
    ):
        parts += [SegmentBuffer() for _ in range(len(chunks) - len(parts))]
        for part, chunk in zip(parts, chunks, strict=False):
            setattr(part, name, chunk)
    return parts or [SegmentBuffer()]


def _chunks(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _log_chunks(lines: list[LogLine]) -> list[list[LogLine]]:
    """Split log lines by their size as JSON and by their brackets, which readers limit."""
    chunks: list[list[LogLine]] = []
    room = brackets = 0
    for line in lines:
        size = len(json.dumps(line.message)) + 100
        found = line.message.count("{") + line.message.count("[") + 1
        if not chunks or size > room or found > brackets or len(chunks[-1]) >= MAX_LOGS // 2:
            chunks.append([])
            room, brackets = Segment.LIMIT // 4, Segment.CONTAINERS // 4
        chunks[-1].append(line)
        room, brackets = room - size, brackets - found
    return chunks


def _numbers(values: list[Number]) -> tuple[float, ...]:
    tensors = [v.detach().float().reshape(()) for v in values if isinstance(v, torch.Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return tuple(next(read) if isinstance(v, torch.Tensor) else float(v) for v in values)


class _LogHandler(logging.Handler):
    def __init__(self, telemetry: TelemetryWriter) -> None:
        super().__init__(level=logging.INFO)
        self._telemetry = telemetry

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        self._telemetry.log(record.levelname, message)
