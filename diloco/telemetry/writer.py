"""Telemetry: collects what a replica has to tell and writes it in append-only segments.

Losses may be tensors on a GPU: they are read together when a segment is made, so that reporting
does not stop the device at every step. A segment that cannot be written is kept and tried again
under the same number; nothing is lost unless the process is.
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
from diloco.telemetry.system_metrics import Usage

Number = float | torch.Tensor
STEPS = MAX_STEPS // 2
ROWS = min(MAX_ROUNDS, MAX_EVALUATIONS) // 2


@dataclass
class _Pending:
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


class Reporter:
    """Writes a segment every ``interval_s`` if there is anything to tell."""

    MAX_LOGS = 1000
    """Log lines kept for one segment; beyond that the oldest go, and a line says how many."""

    def __init__(
        self, store: Store, identity: Identity, *, clock: Clock, interval_s: float
    ) -> None:
        self._store = store
        self._identity = identity
        self._clock = clock
        self._interval_s = interval_s
        self._usage = Usage(clock)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._pending = _Pending()
        self._dropped_logs = 0
        self._n = 1
        self._unwritten: Segment | None = None
        self._queue: deque[tuple[_Pending, bool]] = deque()
        self._state = "syncing"
        self._steps, self._tokens = 0, 0
        self._round = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._handler = _LogHandler(self)

    def start(self) -> None:
        logging.getLogger("diloco").addHandler(self._handler)
        self._thread.start()

    def phase(self, *, state: str, round: int) -> None:
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
        with self._lock:
            told = replace(report, step=self._steps, tokens=self._tokens)
            self._pending.rounds.append(told)

    def evaluation(self, evaluation: Evaluation) -> None:
        with self._lock:
            self._pending.evaluations.append(evaluation)

    def log(self, level: str, message: str) -> None:
        with self._lock:
            logs = self._pending.logs
            logs.append(LogLine(wall_s=self._clock.wall(), level=level, message=message[:4000]))
            if len(logs) > self.MAX_LOGS:
                self._dropped_logs += 1
                del logs[0]

    def flush(self, *, last: bool = False) -> None:
        """Write what has been collected. Raises :class:`StoreError`; nothing is lost then."""
        with self._flushing:
            if self._unwritten is not None:
                self._write(self._unwritten)
            with self._lock:
                pending, self._pending = self._pending, _Pending()
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

    def _segment(self, p: _Pending, *, last: bool) -> Segment:
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
        while not self._ended.wait(self._interval_s):
            try:
                self.flush()
            except StoreError as error:
                # Not logged through the reporter: it would add a line at every failed try.
                print(f"telemetry failed, will try again: {error}", file=sys.stderr, flush=True)


def _split(pending: _Pending) -> list[_Pending]:
    """Parts of at most half of what a segment may hold: after an outage of the store, hours of
    steps may be waiting. At least one part."""
    columns = ("step", "round", "wall_s", "tokens", "loss", "lr", "grad_norm", "step_s")
    parts = [
        _Pending(**{name: getattr(pending, name)[start : start + STEPS] for name in columns})
        for start in range(0, len(pending.step), STEPS)
    ]
    for name, chunks in (
        ("rounds", _chunks(pending.rounds, ROWS)),
        ("evaluations", _chunks(pending.evaluations, ROWS)),
        ("logs", _log_chunks(pending.logs)),
    ):
        parts += [_Pending() for _ in range(len(chunks) - len(parts))]
        for part, chunk in zip(parts, chunks, strict=False):
            setattr(part, name, chunk)
    return parts or [_Pending()]


def _chunks(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _log_chunks(lines: list[LogLine]) -> list[list[LogLine]]:
    """By their size as JSON, and by brackets, which readers count before they parse."""
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
    def __init__(self, reporter: Reporter) -> None:
        super().__init__(level=logging.INFO)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        self._reporter.log(record.levelname, message)
