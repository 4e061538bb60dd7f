"""The interface of a tracker, and the rows that it receives.

A row holds all values that one owner (a replica, or the run itself) has at one step. Rows of a
mirrored run are numbered from 0 without gaps. A batch of rows that may have been delivered already
is delivered again with the same numbers and the same content, and every tracker stores it once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Outcome = Literal["succeeded", "failed", "cancelled"]
Open = Callable[..., Any]
"""Opens a ``urllib.request.Request`` with the keyword ``timeout_s``, like
``urllib.request.urlopen``."""

BATCH_VALUES = 1000
"""Values per batch. MLflow accepts 1,000 metrics in a request
(https://mlflow.org/docs/latest/rest-api.html#request-limits)."""


class TrackerError(Exception):
    """The tracker could not be reached or refused the data. The message has no secret."""


def json_number(value: float) -> float | str:
    """A number, or a text for a value that JSON lacks, as MLflow (protobuf's JSON form,
    https://protobuf.dev/programming-guides/json/) and trackio have them."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


@dataclass(frozen=True, kw_only=True)
class TrackerRow:
    """Values of one owner at one step.

    Attributes:
        number: position of the row among all rows of the mirrored run, from 0.
        owner: prefix of the names: ``replica/3`` for a replica, empty for the run.
        step: inner step of the replica, or round of the run.
        wall_s: seconds since the epoch.
        values: series name -> value; NaN and infinities are allowed.
    """

    number: int
    owner: str
    step: int
    wall_s: float
    values: Mapping[str, float]

    def named_values(self) -> dict[str, float]:
        """Values by their full names, such as ``replica/3/loss`` or ``eval_loss``."""
        prefix = f"{self.owner}/" if self.owner else ""
        return {f"{prefix}{name}": value for name, value in self.values.items()}

    def to_dict(self) -> dict[str, Any]:
        """The row for JSON. Values that JSON lacks become texts (``"nan"``)."""
        values = {name: repr(float(value)) for name, value in self.values.items()}
        return {**self.__dict__, "values": values}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> TrackerRow:
        values = {name: float(text) for name, text in body["values"].items()}
        return cls(**{**body, "values": values})


@dataclass(frozen=True, kw_only=True)
class MirroredRun:
    """The run that a tracker shows.

    Attributes:
        id: unique and stable; the tracker finds the run by it after a crash.
        config: settings and workload, flat: name -> number, text or boolean.
    """

    id: str
    name: str
    started_s: float
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()


class Tracker(Protocol):
    """Where the rows of one run go.

    ``state`` is a JSON object that the caller stores after each successful call and passes to the
    next one; it is empty at first. Methods raise :class:`TrackerError`, and may be repeated with
    the state from before."""

    def start(self, run: MirroredRun, state: dict[str, Any]) -> dict[str, Any]:
        """Create the run in the tracker, or find the one that an earlier attempt created."""

    def log(
        self, run: MirroredRun, rows: Sequence[TrackerRow], state: dict[str, Any]
    ) -> dict[str, Any]:
        """Store the rows, each once, however often they are delivered."""

    def finish(self, run: MirroredRun, outcome: Outcome, state: dict[str, Any]) -> dict[str, Any]:
        """Mark the run as ended."""

    def url(self, state: Mapping[str, Any]) -> str:
        """The address of the run's page, or ''."""
