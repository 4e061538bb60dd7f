"""Late and healing replicas, and fragments, for runs of :mod:`tests.browser.seed`."""

from __future__ import annotations

import datetime
from typing import Any


def late_and_healing(
    run: Any, *, late: tuple[int, int] = (9, 2), healing: Any = ((6, 3), (7, 3))
) -> Any:
    """Add a contribution that is 2.4 s late, and healing replicas, given as (round, replica)."""
    from django.db import transaction

    from runs.metrics import round_strips
    from runs.models import Contribution, Round

    closes = datetime.timedelta(seconds=0.6)
    for row in Round.objects.filter(run=run, committed_at__isnull=False):
        row.planned_at = row.committed_at - closes
        row.save(update_fields=["planned_at"])
        Contribution.objects.filter(round=row, state="included").update(
            uploaded_at=row.planned_at - closes
        )
        if row.number == late[0]:
            Contribution.objects.filter(round=row, replica__number=late[1]).update(
                uploaded_at=row.planned_at + datetime.timedelta(seconds=2.4)
            )
        healed = [replica for number, replica in healing if number == row.number]
        row.contributions.filter(replica__number__in=healed).delete()
        row.contributors = row.contributions.filter(state="included").count()
        row.save(update_fields=["contributors"])
        with transaction.atomic():  # the row is locked
            row = round_strips.rebuild(row)
            round_strips.heal(row, healed)
            row.save(update_fields=["outcomes", "timings"])
    return run


def fragments(run: Any, parts: int = 4) -> Any:
    """Distribute the rounds over ``parts`` fragments in turn."""
    from django.db.models import F

    run.group_settings = run.group_settings | {"num_fragments": parts}
    run.save(update_fields=["group_settings"])
    run.rounds.update(fragment=(F("number") - 1) % parts)
    return run
