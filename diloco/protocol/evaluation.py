"""Evaluations of checkpoints: what is measured, and the record of the results. No torch.

The result of an evaluation is a create-once object in the run's bucket. Its key follows from the
round and from what was measured, so an evaluation that is repeated finds the first result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from diloco.protocol import keys
from diloco.protocol.parsing import abridged
from diloco.protocol.record_base import BOUNDS, BadRecord, Record
from diloco.protocol.settings import SettingsError

LOSS, PERPLEXITY = "loss", "perplexity"
TOKENS = 65_536
MOST_TOKENS = 10**9
MOST_TASKS = 16
MOST_EXAMPLES = 10**6
MOST_METRICS = 200
METRIC_CHARS = 64
DATA_CHARS = 500

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,79}")
_METRIC = re.compile(rf"[A-Za-z0-9_]{{1,{METRIC_CHARS}}}")


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Measurement of a checkpoint. Raises :class:`SettingsError`.

    Args:
        data: URI of token shards, whose held-out part is read; '' for the held-out data of the
            run's workload.
        tokens: number of tokens whose loss is measured; 0 for none. The workload determines the
            number of its own held-out data.
        tasks: benchmark tasks of ``lm-eval``.
        examples: examples of each task; 0 for all.
    """

    data: str = ""
    tokens: int = TOKENS
    tasks: tuple[str, ...] = ()
    examples: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if not isinstance(self.data, str) or len(self.data) > DATA_CHARS or "\0" in self.data:
            raise SettingsError("data", f"enter the URI of token shards, found {self.data!r:.80}")
        _check_count("tokens", self.tokens, MOST_TOKENS)
        _check_count("examples", self.examples, MOST_EXAMPLES)
        if len(self.tasks) > MOST_TASKS or len(set(self.tasks)) < len(self.tasks):
            raise SettingsError(
                "tasks",
                f"enter each task once and at most {MOST_TASKS}, found {len(self.tasks)}",
            )
        for task in self.tasks:
            if not isinstance(task, str) or not _TASK.fullmatch(task):
                raise SettingsError(
                    "tasks", f"enter names of tasks such as arc_easy, found {task!r:.80}"
                )
        if not self.tokens and not self.tasks:
            raise SettingsError("tokens", "enter a number of tokens or a task, found neither")

    @property
    def name(self) -> str:
        """16 hex digits that identify this specification."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[: keys.EVALUATION_NAME_DIGITS]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def _check_count(name: str, value: object, most: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
    if not is_count:
        raise SettingsError(name, f"enter a whole number from 0 to {most:,}, found {value!r:.80}")


@dataclass(frozen=True, kw_only=True)
class EvaluationMetric:
    """One result. ``stderr`` is its standard error, None if it is not known."""

    name: str
    value: float
    stderr: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Record):
    """Create-once: the metrics of the global weights after ``round``.

    ``weights`` is the digest of the weights in their manifest, ``data`` that of the index of the
    token shards ('' for the workload's own data). ``tokens`` are those whose loss was measured,
    ``harness`` is the version of lm-eval ('' without tasks), ``seconds`` the duration.
    """

    LIMIT: ClassVar[int] = 64 * 1024
    CONTAINERS: ClassVar[int] = 1000

    round: int = dataclasses.field(metadata={BOUNDS: (0, keys.LAST_ROUND)})
    spec: str
    weights: str
    data: str
    metrics: tuple[EvaluationMetric, ...]
    tokens: int = dataclasses.field(metadata={BOUNDS: (0, 2**63 - 1)})
    harness: str
    device: str
    seconds: float
    wall_s: float

    def check(self, *, round: int, spec: EvaluationSpec) -> None:
        """Raise :class:`BadRecord` unless this is a result of ``spec`` for ``round`` whose metrics
        are finite numbers with proper and distinct names."""
        if self.round != round or self.spec != spec.name:
            raise BadRecord(
                f"expected the result {spec.name} of round {round}, found {abridged(self.spec)} of "
                f"round {self.round}"
            )
        if not 1 <= len(self.metrics) <= MOST_METRICS:
            raise BadRecord(f"expected 1 to {MOST_METRICS} metrics, found {len(self.metrics)}")
        for metric in self.metrics:
            if not _METRIC.fullmatch(metric.name):
                raise BadRecord(
                    f"expected a metric's name of at most {METRIC_CHARS} letters, digits and "
                    f"underscores, found {abridged(metric.name)}"
                )
            for value in (metric.value, metric.stderr):
                if value is not None and not math.isfinite(value):
                    raise BadRecord(f"{metric.name}: expected a finite number, found {value}")
        if len({metric.name for metric in self.metrics}) < len(self.metrics):
            raise BadRecord("expected each metric once, found one twice")


def metric_name(*parts: str) -> str:
    """The name of a metric from its parts, e.g. a task and its metric."""
    text = "_".join(re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") for part in parts if part)
    return text[:METRIC_CHARS]


def perplexity(loss: float) -> float:
    """e to the loss in nats; infinity beyond the range of a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
