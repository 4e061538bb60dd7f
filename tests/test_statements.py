"""The option ``--statements``, and the choice of the tests that run on PostgreSQL too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db.backends.utils import CursorWrapper

from tests import statements
from tests.statements import Sent, cheapest, without_values

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("sent", "shape"),
    [
        ("SELECT 1 FROM a WHERE b = 'it''s' LIMIT 21", "SELECT %s FROM a WHERE b = %s LIMIT %s"),
        ("WHERE a IN (%s, %s, %s)", "WHERE a IN (%s)"),
        ("VALUES (%s, NULL, 7), (%s, %s, 8)", "VALUES (%s)"),
        ('SAVEPOINT "s140_x3"', "SAVEPOINT SAVEPOINT"),
        ('SELECT "t1"."p95" FROM t1', 'SELECT "t1"."p95" FROM t1'),
    ],
)
def test_statements_that_differ_in_their_values_are_one(sent: str, shape: str) -> None:
    assert without_values(sent) == shape


@pytest.mark.django_db
def test_every_statement_of_a_test_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = statements.Recorder()
    recording = recorder.recording(CursorWrapper._execute)  # type: ignore[attr-defined]
    monkeypatch.setattr(CursorWrapper, "_execute", recording)
    for name in ("olga", "oscar"):
        User.objects.filter(username=name).exists()
    [sent] = recorder.sent
    assert sent.startswith("SELECT %s AS") and sent.endswith('"username" = %s LIMIT %s')


def test_the_cheapest_tests_that_send_what_is_missing_are_added() -> None:
    sent = {
        "chosen": Sent(5.0, {"a", "b"}),
        "dear": Sent(9.0, {"a", "c", "d"}),
        "cheap": Sent(1.0, {"c"}),
        "repeats": Sent(0.1, {"a", "b"}),
        "other": Sent(2.0, {"d"}),
    }
    assert cheapest(sent, ["chosen"], share=1.0) == ["cheap", "other"]
    assert cheapest(sent, ["chosen"], share=0.75) == ["cheap"]
    assert cheapest(sent, ["chosen"], share=0.5) == []


def test_a_line_of_each_test_is_written_and_read_by_function(tmp_path: Path) -> None:
    report = statements.Report(tmp_path / "sent")
    for name, sent in (("a.py::one[1]", ["x"]), ("a.py::one[2]", ["x", "y"]), ("b.py::two", [])):
        one: Any = pytest.TestReport(name, ("", 0, ""), {}, "passed", None, "teardown")  # type: ignore[arg-type]
        one.user_properties = [("sent", [0.5, sent])]
        report.pytest_runtest_logreport(one)
    assert json.loads((tmp_path / "sent").read_text().splitlines()[1]) == [
        *("a.py::one[2]", 0.5, ["x", "y"])
    ]
    assert statements.read(tmp_path / "sent") == {
        "a.py::one": Sent(1.0, {"x", "y"}),
        "b.py::two": Sent(0.5, set()),
    }


def test_the_selection_names_existing_tests_once() -> None:
    names = statements.selected()
    assert len(names) == len(set(names)) > 20
    for name in names:
        file, _, function = name.partition("::")
        assert not function or file not in names, name
        assert f"def {function}" in (ROOT / file).read_text(), name
