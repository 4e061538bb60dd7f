"""Append-only telemetry segments of a replica.

A replica writes segments 1, 2, 3, ... under its own incarnation; a reader GETs the next number
until it is missing. Nothing is listed and no segment is rewritten, so one cursor per incarnation
makes reading exactly-once.

No decision depends on telemetry, so readers ignore unknown fields (:class:`Extensible`): during an
upgrade, replicas can run newer code than the server. Records that a group has to agree on are
parsed strictly (:mod:`diloco.protocol.records`).

Per-step values are columns (one list per series, aligned by index): a segment of hundreds of steps
is a third of the size and is parsed at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from diloco.protocol.records import MEBIBYTE, Extensible, Record

PHASES = ("compute", "encode", "upload", "wait", "download", "reduce", "apply")
"""Phases of one round on one replica, in order; seconds each. Evaluation and checkpoint writing
count as ``other`` of the preceding round in :class:`RoundReport`."""
STARTUP_PHASES = ("bootstrap", "start")
"""Time of a process before its first step, in the phases of its first round: installing and
fetching code, then everything until it has joined. Waiting for other replicas counts as
``wait``."""


MAX_STEPS = 20_000
MAX_ROUNDS = 1_000
MAX_EVALUATIONS = 1_000
MAX_LOGS = 2_000
MAX_LINE = 4_000
"""Characters of a log line."""
MAX_PHASES = 32
MAX_SYSTEM = 64
"""Limits of each kind per segment. A writer splits at half of them, so that readers of a later
version can lower them."""


@dataclass(frozen=True, kw_only=True)
class StepColumns(Extensible):
    """Per-step series of one segment; all lists have the same length.

    ``step`` is the replica's inner step in the run, ``tokens`` the number of tokens that this
    replica has trained on so far, ``loss`` is in nats per token, ``step_s`` the duration of the
    step.
    """

    step: tuple[int, ...] = ()
    round: tuple[int, ...] = ()
    wall_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    lr: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoundReport(Extensible):
    """One replica's report of one finished round.

    ``outcome``: included, late (committed without this replica), void. ``weights_digest`` is the
    digest of the fragment's global weights after the round (invariant I3: equal in all replicas).

    ``phases`` are seconds of the training loop; with overlap its *wait* is the time it was blocked,
    and the exchange's own phases are in ``background``. ``step`` and ``tokens`` are the replica's
    at the time of the report, as in :class:`StepColumns`; 0 before the first step.

    ``norm`` is the L2 norm of the decoded contribution, ``cosine`` its cosine to the merged mean
    that the round applied (:mod:`diloco.exchange.cosine`); None if the round did not include it,
    and in reports of earlier versions.
    """

    round: int
    outcome: str
    started_wall_s: float
    committed_wall_s: float
    phases: Mapping[str, float]
    background: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int
    bytes_down: int
    requests: int
    norm: float
    update_norm: float
    contributors: int
    weights_digest: str
    step: int = 0
    tokens: int = 0
    cosine: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Extensible):
    """Loss of the **global** weights after ``round`` on held-out data, in nats per token."""

    round: int
    loss: float
    tokens: int
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class LogLine(Extensible):
    """One line of a replica's log."""

    wall_s: float
    level: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Segment(Extensible, Record):
    """One object under ``telemetry/``.

    ``system`` holds the process's machine usage at the time of writing
    (:mod:`diloco.telemetry.system_metrics` lists the metrics); unknown metrics are left out.
    """

    LIMIT: ClassVar[int] = 4 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 50_000

    replica: int
    incarnation: str
    n: int
    wall_s: float
    state: str
    round: int
    steps: StepColumns = field(default_factory=StepColumns)
    rounds: tuple[RoundReport, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    logs: tuple[LogLine, ...] = ()
    system: Mapping[str, float] = field(default_factory=dict)
    last: bool = False
