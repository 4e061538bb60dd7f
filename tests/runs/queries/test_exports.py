"""Exports of all rows of a run in three formats."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest
from django.utils import timezone

from runs.metrics.blocks import Points, split
from runs.models import MetricBlock
from runs.queries import export_formats, exports
from tests.browser import seed, seed_fleet

pytestmark = pytest.mark.django_db
STEPS = 40_000


@pytest.fixture
def run() -> Any:
    made = seed.run(seed.user("owner", "operator"), committed=2, replicas=2)
    for replica in made.replicas.all():
        seed_fleet.attempts(replica, backend="local", price=0.1, earlier=1, now=timezone.now())
    return made


def write(run: Any, table: str, format: str) -> bytes:
    wanted = exports.TABLES[table]
    return b"".join(export_formats.writer_of(format)(wanted.columns, wanted.chunks(run)))


def add_points(run: Any, values: list[float], series: str = "grad_norm") -> None:
    count = range(len(values))
    points = Points.of(
        step=[i + 1 for i in count],
        round=[1] * len(values),
        tokens=[i * 8 for i in count],
        wall_s=[float(i) for i in count],
        value=values,
    )
    replica = run.replicas.get(number=1)
    MetricBlock.objects.bulk_create(
        MetricBlock(
            run=run, replica=replica, series=series, index=index, count=len(part), data=part.pack()
        )
        for index, part in split(points, "step")
    )


def test_every_point_is_there_in_order(run: Any) -> None:
    add_points(run, [math.sin(i) for i in range(STEPS)])
    rows = list(csv.DictReader(io.StringIO(write(run, "points", "csv").decode())))
    result = [row for row in rows if row["series"] == "grad_norm"]
    assert [int(row["step"]) for row in result] == list(range(1, STEPS + 1))
    assert [float(row["value"]) for row in result] == [math.sin(i) for i in range(STEPS)]
    assert {row["replica"] for row in result} == {"1"}
    assert {row["replica"] for row in rows if row["series"] == "eval_loss"} == {""}
    assert len(rows) == STEPS + sum(
        MetricBlock.objects.exclude(series="grad_norm")
        .filter(level=0)
        .values_list("count", flat=True)
    )


def test_chunks_are_read_on_demand(run: Any, django_assert_num_queries: Any) -> None:
    add_points(run, [0.0] * STEPS)
    chunks = exports.points_of(run)
    most = exports.BLOCKS * 512
    longest = max(len(chunk["step"]) for chunk in chunks)
    assert longest <= most
    chunks = exports.points_of(run)
    with django_assert_num_queries(2):  # the series, and the first chunk of the first one
        next(chunks)


def test_rows_are_split_by_key(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(run, "contributions", "csv")
    monkeypatch.setattr(exports, "ROWS", 1)
    assert write(run, "contributions", "csv") == whole
    assert len(whole.splitlines()) == 1 + sum(r.contributions.count() for r in run.rounds.all())


@pytest.mark.parametrize("table", exports.TABLES)
def test_three_formats_have_the_same_rows(run: Any, table: str) -> None:
    import pyarrow.parquet as pq

    as_csv = list(csv.DictReader(io.StringIO(write(run, table, "csv").decode())))
    as_json = [json.loads(line) for line in write(run, table, "jsonl").splitlines()]
    as_parquet = pq.read_table(io.BytesIO(write(run, table, "parquet"))).to_pylist()
    columns = list(exports.TABLES[table].columns)
    assert len(as_csv) == len(as_json) == len(as_parquet)
    assert as_csv, "the seeded run has some of everything"
    for text, plain, typed in zip(as_csv, as_json, as_parquet, strict=True):
        assert list(text) == list(plain) == list(typed) == columns
        for name, kind in exports.TABLES[table].columns.items():
            value = plain[name]
            assert text[name] == ("" if value is None else str(value)), name
            if kind == "time":
                continue
            assert typed[name] == value, name


def test_nonfinite_numbers(run: Any) -> None:
    import pyarrow.parquet as pq

    add_points(run, [math.nan, math.inf, -math.inf, 1.0], "odd")
    result = [json.loads(line) for line in write(run, "points", "jsonl").splitlines()]
    assert [row["value"] for row in result if row["series"] == "odd"] == ["nan", "inf", "-inf", 1.0]
    rows = csv.DictReader(io.StringIO(write(run, "points", "csv").decode()))
    assert [r["value"] for r in rows if r["series"] == "odd"] == ["nan", "inf", "-inf", "1.0"]
    table = pq.read_table(io.BytesIO(write(run, "points", "parquet"))).to_pylist()
    values = [row["value"] for row in table if row["series"] == "odd"]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.0]


def test_text_with_special_characters(run: Any) -> None:
    hostile = 'a "quote", a comma,\r\na line, é, 😀'
    run.events.create(at=run.created_at, kind="note", message=hostile)
    rows = list(csv.DictReader(io.StringIO(write(run, "events", "csv").decode(), newline="")))
    assert rows[-1]["message"] == hostile
    assert json.loads(write(run, "events", "jsonl").splitlines()[-1])["message"] == hostile


@pytest.mark.parametrize("format", export_formats.CONTENT_TYPES)
def test_a_table_without_rows(run: Any, format: str) -> None:
    import pyarrow.parquet as pq

    run.events.all().delete()
    data = write(run, "events", format)
    if format == "csv":
        assert data.decode().strip() == ",".join(exports.TABLES["events"].columns)
    elif format == "jsonl":
        assert data == b""
    else:
        assert pq.read_table(io.BytesIO(data)).num_rows == 0


def test_missing_pyarrow_fails_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(export_formats.NoParquet, match="expected pyarrow on the server"):
        export_formats.writer_of("parquet")
    export_formats.writer_of("csv")
