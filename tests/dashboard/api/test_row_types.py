"""The row types of the API and its client have the fields of the rows that the queries build."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from archipelago import rows
from runs.alerts import store
from runs.queries import fleet, paging, selectors
from tests.browser import seed


def fields_of(row: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(row)}


@pytest.mark.django_db
def test_row_types_match_the_queries(run: Any) -> None:
    run = selectors.runs_for(seed.user("root", "admin")).get(pk=run.pk)
    run.alerts.create(
        kind="stalled", level="error", message="", first_at=run.created_at, opened_at=run.created_at
    )
    for row, built in (
        (rows.RunHeader, [selectors.run_header(run)]),
        (rows.Pool, fleet.pool_rows(run)),
        (rows.Replica, fleet.replica_rows(run)),
        (rows.Event, paging.events_after(run, 0, limit=1)),
        (rows.LogLine, paging.log_lines(run, limit=1)),
        (rows.Alert, store.alert_rows(run)),
    ):
        assert built, row
        assert set(built[0]) == fields_of(row), row
