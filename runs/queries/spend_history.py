"""The tags that spending belongs to, and the spending that is stored for deleted runs.

A change of tags divides the cost of a job at its time: what was spent before belongs to the tags
until then (:class:`runs.models.TagPeriod`), so a removed tag frees no budget. The spending of a
deleted run is stored by day (:class:`runs.models.RetainedSpend`). If the run is imported again from
its bucket, its jobs count from its deletion on, so nothing counts twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from django.db.models import Max

from runs.json_values import texts
from runs.models import RetainedSpend, Run, TagPeriod


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A time in which an attempt cost ``usd`` evenly; None: its price is unknown."""

    start: datetime
    end: datetime
    usd: float | None

    def before(self, at: datetime) -> Stretch | None:
        """The part until a time; None if there is none."""
        if self.start >= at:
            return None
        return self if self.end <= at else self._part(self.start, at)

    def after(self, at: datetime) -> Stretch | None:
        """The part from a time on; None if there is none."""
        if self.start >= at:
            return self
        return None if self.end <= at else self._part(at, self.end)

    def _part(self, start: datetime, end: datetime) -> Stretch:
        share = (end - start) / (self.end - self.start)
        return replace(
            self, start=start, end=end, usd=None if self.usd is None else self.usd * share
        )


Part = tuple[tuple[str, ...] | None, Stretch]
"""A part of a stretch with the tags of that time; None: the present tags, which never changed."""

_Period = tuple[datetime | None, tuple[str, ...] | None]
_UNCHANGED: list[_Period] = [(None, None)]


@dataclass(frozen=True, kw_only=True)
class SpendHistory:
    """``tags`` has the end of each period of a run's tags; the last period has no end.
    ``retained_until`` is when runs that exist again were deleted."""

    tags: dict[uuid.UUID, list[_Period]] = field(default_factory=dict)
    retained_until: dict[uuid.UUID, datetime] = field(default_factory=dict)

    @property
    def runs(self) -> list[uuid.UUID]:
        """The runs whose costs cannot be summed up by the database."""
        return [*{**self.tags, **self.retained_until}]

    def parts(self, run: uuid.UUID, stretch: Stretch) -> Iterator[Part]:
        """The parts of a stretch that count, each with the tags that it belongs to."""
        rest: Stretch | None = stretch
        if (deleted := self.retained_until.get(run)) is not None:
            rest = stretch.after(deleted)
        for until, tags in self.tags.get(run, _UNCHANGED):
            if rest is None:
                return
            part = rest if until is None else rest.before(until)
            if part is not None:
                yield tags, part
            rest = None if until is None else rest.after(until)


def history(since: datetime) -> SpendHistory:
    """The history of spending since a time. Two or three queries."""
    periods = TagPeriod.objects.filter(until__gt=since).order_by("until", "id")
    tags: dict[uuid.UUID, list[_Period]] = {}
    for run, until, stored in periods.values_list("run", "until", "tags"):
        tags.setdefault(run, []).append((until, tuple(texts(stored))))
    if tags:
        for run, stored in Run.objects.filter(pk__in=tags).order_by().values_list("pk", "tags"):
            tags[run].append((None, tuple(texts(stored))))
    return SpendHistory(tags=tags, retained_until=deleted_and_back())


def history_of(run: Run) -> SpendHistory:
    """The whole history of one run."""
    periods = TagPeriod.objects.filter(run=run).order_by("until", "id")
    tags: list[_Period] = [
        (until, tuple(texts(stored))) for until, stored in periods.values_list("until", "tags")
    ]
    tags.append((None, tuple(texts(run.tags))))
    retained = RetainedSpend.objects.filter(run=run.pk).aggregate(at=Max("deleted_at"))["at"]
    return SpendHistory(
        tags={run.pk: tags}, retained_until={} if retained is None else {run.pk: retained}
    )


def deleted_and_back() -> dict[uuid.UUID, datetime]:
    """When runs that exist again were deleted. One query."""
    again = Run.objects.filter(pk__in=RetainedSpend.objects.values("run")).values("pk")
    rows = RetainedSpend.objects.filter(run__in=again).order_by().values_list("run")
    return dict(rows.annotate(at=Max("deleted_at")))


def distinct(tags: Sequence[str]) -> tuple[str, ...]:
    """The groups of a tag table that spending counts under; '' without a tag."""
    return tuple(dict.fromkeys(tags)) or ("",)
