"""Sums of spending, and their rows: groups, days and the forecast."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from runs.json_values import finite
from runs.queries.attempt_costs import DAY
from runs.queries.spend_history import distinct


@dataclass
class Tally:
    """A sum of known costs, and what is unknown beside it."""

    usd: float = 0.0
    unpriced_s: float = 0.0
    jobs: int = 0
    unpriced_jobs: int = 0

    def count(self, usd: float | None, s: float) -> None:
        """Add a part of a job."""
        self.jobs += 1
        if usd is None:
            self.unpriced_jobs += 1
            self.unpriced_s += s
        else:
            self.usd += usd

    def of_one_job(self) -> Tally:
        """The same, if all parts are of one job."""
        self.jobs, self.unpriced_jobs = min(self.jobs, 1), min(self.unpriced_jobs, 1)
        return self

    def add(self, other: Tally) -> None:
        self.usd += other.usd
        self.unpriced_s += other.unpriced_s
        self.jobs += other.jobs
        self.unpriced_jobs += other.unpriced_jobs

    @property
    def known_usd(self) -> float | None:
        """None if no price is known."""
        return None if self.jobs and self.unpriced_jobs == self.jobs else self.usd


@dataclass
class Groups:
    """The rows of the tables."""

    backends: dict[str, Tally] = field(default_factory=dict)
    owners: dict[str, Tally] = field(default_factory=dict)
    runs: dict[str, Tally] = field(default_factory=dict)
    tags: dict[str, Tally] = field(default_factory=dict)

    def add(self, tally: Tally, *, backend: str, owner: str, run: uuid.UUID) -> None:
        for group, key in ((self.backends, backend), (self.owners, owner), (self.runs, str(run))):
            group.setdefault(key, Tally()).add(tally)

    def add_tags(self, tally: Tally, tags: Sequence[str]) -> None:
        for tag in distinct(tags):
            self.tags.setdefault(tag, Tally()).add(tally)


def group_rows(
    tallies: dict[str, Tally], labels: dict[str, str], limit: int
) -> list[dict[str, Any]]:
    """Rows of a table, the most expensive first, and one that sums up the rest."""
    order = sorted(tallies.items(), key=lambda item: (-item[1].usd, -item[1].unpriced_s, item[0]))
    rows = [group_row(key, labels.get(key, key), tally) for key, tally in order[:limit]]
    rest = order[limit:]
    if rest:
        rows.append(group_row("", "", total(tally for _, tally in rest), others=len(rest)))
    return rows


def group_row(key: str, label: str, tally: Tally, *, others: int = 0) -> dict[str, Any]:
    return {
        "key": key,
        "label": label,
        "jobs": tally.jobs,
        "usd": finite(tally.known_usd),
        "unpriced_jobs": tally.unpriced_jobs,
        "unpriced_s": tally.unpriced_s,
        "others": others,
        "deleted": False,
    }


def total(tallies: Iterable[Tally]) -> Tally:
    result = Tally()
    for tally in tallies:
        result.add(tally)
    return result


def day_row(day: date, backends: dict[str, Tally]) -> dict[str, Any]:
    whole = total(backends.values())
    return {
        "day": day.isoformat(),
        "usd": finite(whole.known_usd),
        "unpriced_s": whole.unpriced_s,
        "backends": {name: tally.usd for name, tally in sorted(backends.items()) if tally.usd > 0},
    }


def forecast(month: Tally, rate: dict[str, Any], now: datetime) -> float | None:
    """Spending of the calendar month if the present jobs run until its end."""
    spent, usd_h = month.known_usd, rate["usd_h"]
    if spent is None or usd_h is None:
        return None
    following = (now.replace(day=1) + 32 * DAY).replace(day=1)
    end = following.replace(hour=0, minute=0, second=0, microsecond=0)
    return finite(spent + usd_h * (end - now).total_seconds() / 3600)
