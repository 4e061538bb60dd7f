"""The layout of a run's overview: panels with size, pin and order, and the options of their charts.

The address of the page holds it, ``?panels=loss.l,m:grad_norm.s!,-cosine&x=tokens&log=y``, read by
``static/js/run/panels.js``. A size is s, m or l; ``!`` is pinned, ``-`` removed, and ``m:`` an
added metric. Panels that are not listed have their usual size and place; the listed ones come in
the order of the list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlencode

from runs.exceptions import InvalidRun
from runs.models import RunView

AXES = ("step", "round", "tokens", "wall", "relative")
LOG_AXES = ("", "x", "y", "xy")
MOST_SMOOTH = 0.98
MOST_PANELS = 36
LONGEST = 4000
_PANEL = re.compile(
    r"-[A-Za-z0-9_-]{1,100}|(?:m:[A-Za-z0-9_.-]{1,100}|[A-Za-z0-9_-]{1,100})\.[sml]!?"
)


@dataclass(frozen=True, kw_only=True)
class PanelLayout:
    """``smooth`` is None for the usual smoothing; ``clip`` is None where only charts that end in
    NaN clip their outliers."""

    panels: str = ""
    x: str = AXES[0]
    smooth: float | None = None
    log: str = ""
    clip: bool | None = None

    def __post_init__(self) -> None:
        """Raise :class:`~runs.exceptions.InvalidRun` for a value that the page does not read."""
        if len(self.panels) > LONGEST:
            raise InvalidRun("panels", f"expected at most {LONGEST} characters")
        ids = []
        for panel in self.panels.split(",") if self.panels else ():
            if not _PANEL.fullmatch(panel):
                message = f"expected panels such as loss.l or -cosine, found {panel[:100]!r}"
                raise InvalidRun("panels", message)
            ids.append(panel.removeprefix("-") if panel[0] == "-" else panel.rpartition(".")[0])
        if len(ids) > MOST_PANELS:
            raise InvalidRun("panels", f"expected at most {MOST_PANELS} panels, found {len(ids)}")
        if len(set(ids)) < len(ids):
            raise InvalidRun("panels", "expected each panel once")
        if self.x not in AXES:
            raise InvalidRun("x", f"expected one of {', '.join(AXES)}, found {self.x[:40]!r}")
        if self.smooth is not None and not 0 <= self.smooth <= MOST_SMOOTH:
            raise InvalidRun("smooth", f"expected 0 to {MOST_SMOOTH}, found {self.smooth}")
        if self.log not in LOG_AXES:
            raise InvalidRun("log", f"expected x, y or xy, found {self.log[:40]!r}")

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Self:
        """Parse query parameters. Raises :class:`~runs.exceptions.InvalidRun`."""
        try:
            smooth = float(values["smooth"]) if values.get("smooth") else None
        except ValueError:
            smooth = math.nan
        return cls(
            panels=values.get("panels", ""),
            x=values.get("x") or AXES[0],
            smooth=smooth,
            log=values.get("log", ""),
            clip={"1": True, "0": False}.get(values.get("clip", "")),
        )

    @classmethod
    def of_view(cls, view: RunView) -> Self:
        """A stored layout; the usual one if this version does not read it."""
        try:
            return cls(
                panels=view.panels, x=view.x, smooth=view.smooth, log=view.log, clip=view.clip
            )
        except InvalidRun:
            return cls()

    def __str__(self) -> str:
        """The query string; at least ``?``, so that it works as a link."""
        values = {
            "panels": self.panels,
            "x": "" if self.x == AXES[0] else self.x,
            "smooth": "" if self.smooth is None else f"{self.smooth:g}",
            "log": self.log,
            "clip": "" if self.clip is None else str(int(self.clip)),
        }
        return f"?{urlencode({k: v for k, v in values.items() if v}, safe=',:!')}"
