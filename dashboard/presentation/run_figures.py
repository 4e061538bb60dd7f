"""The figures of a run that its page keeps current, as text: they have their final size from the
first frame on. ``static/js/run/header.js`` writes the same texts."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from dashboard.presentation import formats


def live_figures(
    header: Mapping[str, Any],
    *,
    created_at: datetime.datetime,
    ended_at: datetime.datetime | None,
    now: datetime.datetime,
    current: bool,
    seen_at: datetime.datetime | None = None,
) -> dict[str, str]:
    """Return the figures of a run's header row by name.

    Args:
        current: whether figures that hold only at present are shown: the run has not ended, and its
            data are up to date.
        seen_at: time of the newest data, which is shown if they are out of date.
    """
    at = ended_at or created_at
    up, down = header["bytes_up"], header["bytes_down"]
    eta_s, speed, usd_h = (
        header[name] if current else None for name in ("eta_s", "tokens_per_s", "usd_h")
    )
    late = None if current or seen_at is None else (now - seen_at).total_seconds()
    return {
        "as_of": "" if late is None else f"As of {formats.ago(late)}",
        "elapsed": formats.elapsed(((ended_at or now) - created_at).total_seconds()),
        "elapsed_note": f"{'ended' if ended_at else 'since'} {formats.clock(at, now=now)}",
        "elapsed_title": formats.instant(at),
        "bytes": formats.size(up + down),
        "bytes_note": f"{formats.size(up)} ↑  {formats.size(down)} ↓",
        "eta": "" if eta_s is None else f"{formats.elapsed(eta_s)} left",
        "speed": "" if speed is None else f"{formats.count(speed)} tokens/s",
        "rate": _price(usd_h, header["usd_h_known"]) if usd_h else "",
    }


def _price(usd_h: float, known: bool) -> str:
    return f"{formats.money(usd_h)}/h{'' if known else ' +'}"
