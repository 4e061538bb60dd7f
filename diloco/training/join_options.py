"""The arguments of :func:`diloco.join` that a replica keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

from diloco.clock import Clock
from diloco.membership.graceful_shutdown import GracefulShutdown
from diloco.model.buffers import Buffers
from diloco.model.inner_state import Stateful
from diloco.protocol.control_pace import TELEMETRY_INTERVAL_S
from diloco.protocol.settings import GroupSettings
from diloco.telemetry.startup_timing import Startup
from diloco.training.post_round import Evaluate
from diloco.training.progress import OnRound, OnStatus, ignore_status
from diloco.training.sample import Sampler

Publish = Literal["model", "exchanged"]
"""model: the final weights are the whole state dict. exchanged: they are what replicas exchange, so
that frozen parameters never leave the machine."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The arguments of :func:`diloco.join`, which documents them. ``on_round`` and ``on_status``
    are its ``progress``; ``replica`` None takes a number from the store."""

    replica: int | None
    model: nn.Module
    inner_optimizers: tuple[torch.optim.Optimizer, ...]
    evaluate: Evaluate | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    sample: Sampler | None = None
    heartbeat_interval_s: float | None = None
    telemetry_interval_s: float = TELEMETRY_INTERVAL_S
    buffers: Buffers | None = None
    publish: Publish = "model"
    stateful: Mapping[str, Stateful] | None = None
    on_round: OnRound | None = None
    on_status: OnStatus = ignore_status
    graceful_shutdown: GracefulShutdown | None = None
    startup: Startup | None = None
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if self.publish not in (choices := get_args(Publish)):
            raise ValueError(
                f"publish: expected {choices[0]!r} or {choices[1]!r}, found {self.publish!r}"
            )


def layout_options(settings: GroupSettings, options: JoinOptions) -> dict[str, Any]:
    """Return the keywords of a :class:`~diloco.model.flat_parameters.Layout`, which are equal on
    all ranks."""
    return {
        "fragments": settings.num_fragments,
        "pattern": settings.fragment_pattern,
        "buffers": options.buffers == "average",
        "compare_frozen": settings.frozen == "equal",
    }
