"""Append-only telemetry segments: what a replica tells the dashboard.

A replica writes segment 1, 2, 3, ... under its own incarnation; a reader GETs the next number
until it is not there. Nothing is listed and no segment is ever rewritten, so a cursor per
incarnation makes reading exactly-once.

Nothing is decided by what they say, so a reader leaves out fields it does not know
(:class:`Growing`): while servers are upgraded one by one, replicas may run newer code than who
reads them. What the group agrees by stays strict (:mod:`diloco.protocol.records`).

Per-step values travel as columns (one list per series, aligned by index), because a segment of
hundreds of steps is then a third of the size and is parsed in one go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from diloco.protocol.records import MEBIBYTE, Growing, Record

PHASES = ("compute", "encode", "upload", "wait", "download", "reduce", "apply")
"""Phases of one round on one replica, in order; seconds each. Evaluation and checkpoint writing
are ``other`` of the round after which they came, in :class:`RoundReport`."""
STARTUP_PHASES = ("bootstrap", "start")
"""What a process took before its first step, in the phases of its first round: installing and
fetching code, then everything until it had joined. What it waited for others is in ``wait``."""


MAX_STEPS = 20_000
MAX_ROUNDS = 1_000
MAX_EVALUATIONS = 1_000
MAX_LOGS = 2_000
MAX_LINE = 4_000
"""Characters of a log line."""
MAX_PHASES = 32
MAX_SYSTEM = 64
"""The most of each that one segment may hold. A writer splits what is more, at half of these, so
that readers of a later version may lower them."""


@dataclass(frozen=True, kw_only=True)
class StepColumns(Growing):
    """Per-step series of one segment; all lists have one length.

    ``step`` is the replica's inner step counted over the run, ``tokens`` the tokens this replica
    has trained on so far, ``loss`` in nats per token, ``step_s`` the duration of the step.
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
class RoundReport(Growing):
    """One replica's view of one finished round.

    ``outcome``: included, late (committed without this replica), void. ``weights_digest`` is the
    digest of the fragment's global weights after the round (invariant I3: all replicas must agree).

    ``phases`` are seconds of the training loop: with overlap its *wait* is how long it was blocked,
    and the exchange's own phases are ``background``. ``step`` and ``tokens`` are the replica's own
    when it reported, as in :class:`StepColumns`; 0 where it had taken no step yet.

    ``norm`` is the length of the decoded contribution, ``cosine`` its cosine to the merged mean
    that the round applied (:mod:`diloco.exchange.cosine`); None where the round did not take it,
    and of replicas that do not tell.
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
class Evaluation(Growing):
    """Loss of the **global** weights after ``round`` on held-out data, nats per token."""

    round: int
    loss: float
    tokens: int
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class LogLine(Growing):
    wall_s: float
    level: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Segment(Growing, Record):
    """One object under ``telemetry/``. ``system`` is what the process used of its machine when it
    was written (:mod:`diloco.telemetry.system_metrics` names the figures); one that is not known is
    not there."""

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
