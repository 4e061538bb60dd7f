"""Durations of the phases before a replica's first step, reported once with its first round.

*bootstrap* installs requirements and fetches code; *start* covers interpreter, imports, data, model
and joining the group. The bootstrap script sets ``DILOCO_BOOTSTRAP`` to
``{"install_s": 12.3, "fetch_s": 0.4}`` and then replaces itself by this process (``exec``, which
keeps the process age).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diloco.clock import Clock, SystemClock

log = logging.getLogger(__name__)

BOOTSTRAP = "DILOCO_BOOTSTRAP"
IMPORTED_S = SystemClock().monotonic()


@dataclass(frozen=True, kw_only=True)
class Startup:
    """``began_s`` is the monotonic time at which the start began; ``phases`` has the seconds of
    each phase before it."""

    began_s: float
    phases: Mapping[str, float] = field(default_factory=dict)

    def until(self, now_s: float) -> dict[str, float]:
        """Return the seconds of all phases, with the start ending at ``now_s``."""
        return {**self.phases, "start": max(0.0, now_s - self.began_s)}


def startup_of_process(environment: Mapping[str, str], clock: Clock) -> Startup:
    """Measure the startup of this process from its environment and its age."""
    bootstrap_s = _bootstrap_s(environment.get(BOOTSTRAP, ""))
    age_s = process_age_s(clock)
    phases = {} if bootstrap_s is None else {"bootstrap": bootstrap_s}
    # torchrun starts child processes, whose age does not include the bootstrap.
    if bootstrap_s is not None and environment.get("WORLD_SIZE", "1") == "1":
        age_s = max(0.0, age_s - bootstrap_s)
    return Startup(began_s=clock.monotonic() - age_s, phases=phases)


def _bootstrap_s(text: str) -> float | None:
    """Parse the seconds of the bootstrap; return None if they are missing or invalid."""
    if not text:
        return None
    try:
        values = json.loads(text)
        seconds = [float(values[name]) for name in ("install_s", "fetch_s")]
    except (ValueError, KeyError, TypeError, RecursionError):
        seconds = [math.nan]
    if not all(0 <= part < math.inf for part in seconds):
        log.warning(
            "%s: expected JSON with install_s and fetch_s in seconds, found %.200r; ignored",
            BOOTSTRAP,
            text,
        )
        return None
    return sum(seconds)


def process_age_s(clock: Clock, proc: Path = Path("/proc")) -> float:
    """Return the age of this process in seconds; without ``/proc``, the seconds since this module
    was imported."""
    imported_s = max(0.0, clock.monotonic() - IMPORTED_S)
    try:
        after_name = (proc / "self/stat").read_text().rpartition(")")[2].split()
        began_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22, starttime
        age_s = float((proc / "uptime").read_text().split()[0]) - began_s
    except (OSError, ValueError, IndexError):
        return imported_s
    # Sandboxes that emulate /proc can report a start before boot or in the future.
    return age_s if began_s > 0 and age_s >= imported_s else imported_s
