"""Formatters, tags and exports accept every value that a column can hold."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from django.template import Context, Template
from hypothesis import given
from hypothesis import strategies as st

from dashboard.presentation import formats, times
from dashboard.templatetags import comparing
from runs.models import LogLine, Run
from runs.queries import export_formats, exports
from runs.queries.comparison import MEASURES
from tests.adversarial.addresses import broken
from tests.adversarial.records import EXTREMES
from tests.browser import seed, seed_fleet
from tests.matrix import matrix

SHOWN = (
    formats.count,
    formats.size,
    formats.loss,
    formats.duration,
    formats.age,
    formats.percent,
    formats.money,
)
columns = st.one_of(st.none(), st.floats(), st.integers(-(2**63), 2**63 - 1))


@pytest.mark.parametrize("show", SHOWN)
@given(value=columns)
def test_every_number_is_formatted_in_few_characters(show: Any, value: Any) -> None:
    assert 0 < len(show(value)) < 30


@given(value=st.one_of(columns, st.text(), st.booleans(), st.lists(st.integers())))
def test_exact_formats_every_value(value: Any) -> None:
    assert isinstance(formats.exact(value), str)


def test_a_huge_loss_is_formatted_with_an_exponent() -> None:
    assert formats.loss(-1.7e308) == "-1.70e+308"
    assert formats.percent(1e308) == "1.00e+308 x"
    assert formats.duration(1e300) == "1.00e+300 s"


@given(value=st.one_of(st.none(), st.datetimes(timezones=st.timezones()), st.text()))
def test_every_time_is_shown(value: Any) -> None:
    for show in (times.clock, times.left):
        assert show(value)


@matrix("of", MEASURES, fast=3, ids=lambda measure: measure.name)
@given(value=columns, change=columns, share=columns)
def test_the_comparison_shows_every_number(of: Any, value: Any, change: Any, share: Any) -> None:
    assert comparing.measure(of, value)
    cell: Any = SimpleNamespace(change=change, share=share)
    assert isinstance(comparing.change(of, cell), str)


@given(value=st.one_of(st.none(), st.datetimes(timezones=st.timezones())))
def test_time_tags_format_every_value(value: Any) -> None:
    assert times.age(value)
    assert times.moment(value)


def test_filters_handle_missing_variables() -> None:
    for name in ("count", "size", "loss", "duration", "percent", "money"):
        template = Template(f"{{% load ui %}}{{{{ value|{name} }}}}")
        for value in (None, "", [], {}, "x", *EXTREMES):
            assert template.render(Context({"value": value}))


@given(text=st.text(alphabet=st.sampled_from("=+-@\t\r\n a1|'＝＋")))
def test_csv_texts_never_start_like_a_formula(text: str) -> None:
    wanted: Any = {"text": "text", "number": "float"}
    chunk = {"text": [text], "number": [-1.5]}
    written = b"".join(export_formats.write_csv(wanted, [chunk])).decode()
    _, row = csv.reader(io.StringIO(written, newline=""))
    assert not row[0].lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋"))
    assert row[0].replace("'", "") == text.replace("'", "")
    assert row[1] == "-1.5"


@pytest.mark.django_db
def test_formulas_in_logs_are_escaped_in_csv() -> None:
    run = seed.run(seed.user("owner", "operator"), committed=1, replicas=1)
    at = run.created_at
    formula = '=HYPERLINK("http://example.com")'
    LogLine.objects.create(replica=run.replicas.get(), at=at, level="info", message=formula)
    table = exports.TABLES["logs"]
    written = b"".join(export_formats.write_csv(table.columns, table.chunks(run))).decode()
    rows = list(csv.DictReader(io.StringIO(written)))
    assert rows[-1]["message"] == f"'{formula}"
    lines = b"".join(export_formats.write_jsonl(table.columns, table.chunks(run))).splitlines()
    assert json.loads(lines[-1])["message"] == formula


@pytest.mark.parametrize("start", ["=1", "+1", "-1", "@a", "＝1"])
@pytest.mark.parametrize("before", ["", " ", '"', "x;", 'x; "', "x\t", "x\r", "x\n", "x\r\n "])
def test_csv_cells_are_safe_with_any_separator(before: str, start: str) -> None:
    """OWASP: a spreadsheet with another separator splits a cell at it."""
    written = export_formats.csv_text(before + start)
    assert f"'{start}" in written or written.startswith("'")
    for cell in re.split(r"[;\t\r\n]", written):
        assert not cell.lstrip(' "').startswith(tuple("=+-@＝＋－＠"))


@pytest.mark.parametrize("text", ["\tx", "\rx", "\n=1"])
def test_csv_cells_that_start_with_whitespace_are_escaped(text: str) -> None:
    assert export_formats.csv_text(text).startswith("'")


EXTREME_COLUMNS: tuple[dict[str, Any], ...] = (
    # Opening every page takes a second: each run combines columns that do not hide each other.
    {
        "tags": {"a": 1},
        "eval_loss": -1.7e308,
        "train_loss": 1.7e308,
        "cost_usd": 1e308,
        "budget_usd": 1e308,
        "phase_s": {"compute": "x"},
    },
    {
        "tags": [1, None, ["x"]],
        "eval_loss": math.inf,
        "cost_usd": -math.inf,
        "phase_s": [],
        "round_s": -1.0,
    },
    {"tags": "text", "tokens": 2**63 - 1, "bytes_up": 2**63 - 1, "tokens_per_s": 5e-324},
    {
        "tags": 5,
        "tokens_per_s": 1.7e308,
        "round_s": 1e308,
        "phase_s": {"compute": 1e308, "wait": 1e308},
    },
)


@pytest.mark.django_db
@matrix("fields", EXTREME_COLUMNS, fast=1, ids=str)
def test_every_page_renders_a_run_with_extreme_values(client: Any, fields: dict[str, Any]) -> None:
    from django.utils import timezone

    owner = seed.user("owner", "operator")
    run = seed.run(owner, committed=2, replicas=2)
    for replica in run.replicas.all():
        seed_fleet.attempts(replica, backend="local", price=0.1, earlier=1, now=timezone.now())
    Run.objects.filter(pk=run.pk).update(**fields)
    client.raise_request_exception = False
    client.force_login(owner)
    assert broken(client, Run.objects.get(pk=run.pk)) == []


@pytest.mark.django_db
@pytest.mark.slow
def test_every_page_renders_attempts_with_malformed_handles(client: Any) -> None:
    from django.utils import timezone

    from executors.catalogue import MAX_PRICE_USD_H
    from runs.models import ReplicaAttempt
    from runs.models.money import MAX_USD

    handles: tuple[Any, ...] = ("text", [1], {"data": 5}, {"backend": [], "data": []}, 7)
    owner = seed.user("owner", "operator")
    run = seed.run(owner, committed=1, replicas=len(handles))
    for handle, replica in zip(handles, run.replicas.all(), strict=True):
        seed_fleet.attempts(replica, backend="local", price=0.1, earlier=0, now=timezone.now())
        attempts = ReplicaAttempt.objects.filter(replica=replica)
        # The limits of validation: the sum of larger amounts can overflow.
        assert attempts.update(handle=handle, cost_usd=MAX_USD, price_usd_h=MAX_PRICE_USD_H) == 1
    client.raise_request_exception = False
    client.force_login(owner)
    assert broken(client, run) == []
