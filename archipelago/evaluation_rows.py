"""Rows of the API about evaluations of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.rows import Row


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan(Row):
    """Measurement of a run's checkpoints.

    ``every``: each ``every``-th checkpoint, and the final weights; 0: only on request. ``data`` is
    the URI of token shards, '' for the held-out data of the run's workload; ``examples`` 0 means
    all. ``series`` are the run's chart series with results, e.g. ``eval-val-perplexity``.
    """

    name: str
    data: str
    tokens: int
    tasks: list[str]
    examples: int
    every: int
    backend: str
    hardware: str
    credential: str
    timeout_s: int
    max_attempts: int
    series: list[str]


@dataclass(frozen=True, kw_only=True)
class EvaluationMetric(Row):
    """One result. ``stderr`` is its standard error, None if it is not known."""

    name: str
    value: float | None
    stderr: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Row):
    """One evaluation of the weights after a round.

    ``state`` is *queued*, *running*, *cancelling*, *succeeded*, *failed*, *cancelled*, or *skipped*
    (the weights were deleted). ``message`` is why it failed or what it waits for.
    """

    id: int
    plan: str
    round: int
    state: str
    message: str
    metrics: list[EvaluationMetric]
    tokens: int
    device: str
    attempts: int
    cost_usd: float | None
    created_at: str | None
    ended_at: str | None


@dataclass(frozen=True, kw_only=True)
class EvaluationAttempt(Row):
    """One backend job of an evaluation. ``log`` is the end of its output, once it has ended."""

    number: int
    launch_key: str
    cause: str
    exit_code: int | None
    message: str
    log: str
    launched_at: str | None
    ended_at: str | None
    cost_usd: float | None
