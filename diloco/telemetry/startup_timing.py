"""What a replica took before its first step: the *bootstrap* (requirements, code) and the *start*
(interpreter, imports, data, model, joining the group). Told once, with its first round.

``DILOCO_BOOTSTRAP`` is set by the process that then became this one (``exec`` keeps its age):
``{"install_s": 12.3, "fetch_s": 0.4}``.
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
    """``began_s`` is when the start began, on the group's clock; ``phases`` are those before it, in
    seconds."""

    began_s: float
    phases: Mapping[str, float] = field(default_factory=dict)

    def until(self, now_s: float) -> dict[str, float]:
        """All phases, the start being over now."""
        return {**self.phases, "start": max(0.0, now_s - self.began_s)}


def startup_of_process(environment: Mapping[str, str], clock: Clock) -> Startup:
    """That of this process, from its environment and its age."""
    bootstrap_s = _bootstrap_s(environment.get(BOOTSTRAP, ""))
    age_s = process_age_s(clock)
    phases = {} if bootstrap_s is None else {"bootstrap": bootstrap_s}
    # torchrun starts processes of its own, whose age has none of it.
    if bootstrap_s is not None and environment.get("WORLD_SIZE", "1") == "1":
        age_s = max(0.0, age_s - bootstrap_s)
    return Startup(began_s=clock.monotonic() - age_s, phases=phases)


def _bootstrap_s(said: str) -> float | None:
    """Seconds of the bootstrap; None where nothing, or nothing sensible, is said."""
    if not said:
        return None
    try:
        took = json.loads(said)
        seconds = [float(took[name]) for name in ("install_s", "fetch_s")]
    except (ValueError, KeyError, TypeError, RecursionError):
        seconds = [math.nan]
    if not all(0 <= part < math.inf for part in seconds):
        log.warning(
            "%s: expected JSON with install_s and fetch_s in seconds, found %.200r; it is ignored",
            BOOTSTRAP, said,
        )  # fmt: skip
        return None
    return sum(seconds)


def process_age_s(clock: Clock, proc: Path = Path("/proc")) -> float:
    """Seconds since this process began, by Linux; elsewhere since this module was imported."""
    imported_s = max(0.0, clock.monotonic() - IMPORTED_S)
    try:
        after_name = (proc / "self/stat").read_text().rpartition(")")[2].split()
        began_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22, starttime
        age_s = float((proc / "uptime").read_text().split()[0]) - began_s
    except (OSError, ValueError, IndexError):
        return imported_s
    # A sandbox that invents these files may have a process older than itself, or not born yet.
    return age_s if began_s > 0 and age_s >= imported_s else imported_s
