"""The statements that tests send to the database, to choose those that run on PostgreSQL too.

``make test-postgres ARGS='-n 0 --statements sent.jsonl tests/runs'`` writes a line for each test:
its CPU seconds, and the statements that read or write rows, without their values.
``.venv/bin/python -m tests.statements sent.jsonl`` prints the cheapest tests that together with
those of ``tests/postgres_selection.txt`` send nearly all of them. Statements of other processes and
those of migrations are not recorded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_profile import used_s

OPTION = "--statements"
SELECTION = Path(__file__).with_name("postgres_selection.txt")
SHARE = 0.95
"""The share of all statements that the selection sends. The others are those of single tests, which
take as long as all of the rest."""

_VALUES = (
    (re.compile(r"'(?:[^']|'')*'"), "%s"),
    (re.compile(r'"s\d+_x\d+"'), "SAVEPOINT"),
    (re.compile(r"_django_curs_\w+"), "CURSOR"),
    (re.compile(r"(?<![\w\"%])-?\d+(?:\.\d+)?\b"), "%s"),
    (re.compile(r"\((?:(?:%s|NULL|DEFAULT)(?:::[\w ]+(?:\[\])?)?(?:, )?)+\)"), "(%s)"),
    (re.compile(r"(\(%s\))(?:, \(%s\))+"), r"\1"),
    (re.compile(r"(?:WHEN \([^()]*\) THEN \S+ ?)+"), "WHEN "),
)


_ROWS = re.compile(r"\(*(?:SELECT|INSERT|UPDATE|DELETE|DECLARE|WITH)\b(?!.*\bpg_catalog\b)")


def without_values(sql: str) -> str:
    """Return the statement without values, whose numbers of rows and of parameters are equal."""
    for pattern, replacement in _VALUES:
        sql = pattern.sub(replacement, sql)
    return sql


@dataclass
class Sent:
    """Statements and CPU seconds of a test function, with all its parameters."""

    cpu_s: float = 0.0
    statements: set[str] = field(default_factory=set)


def cheapest(
    tests: Mapping[str, Sent], chosen: Sequence[str] = (), share: float = SHARE
) -> list[str]:
    """Return the tests to add to those chosen, until ``share`` of all statements is sent: each time
    the one that sends the most new ones for its CPU seconds."""
    missing = set[str]().union(*(sent.statements for sent in tests.values()))
    allowed = (1 - share) * len(missing)
    for name in chosen:
        missing -= tests[name].statements
    added: list[str] = []
    while len(missing) > allowed:
        new = {name: len(sent.statements & missing) for name, sent in tests.items()}
        best = max(new, key=lambda name: new[name] / (tests[name].cpu_s + 0.1))
        added.append(best)
        missing -= tests[best].statements
    return added


def selected() -> list[str]:
    """Return the files and tests that ``.ci/run`` repeats on PostgreSQL."""
    lines = SELECTION.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def register(config: pytest.Config) -> None:
    """Record the statements of this process if the option was given; the controller writes them."""
    target = config.getoption(OPTION)
    if target is None:
        return
    config.pluginmanager.register(Recorder(), "statement-recorder")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(Path(target)), "statement-report")


class Recorder:
    """Records each test of this process and sends the result with the test's last report."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self._began = 0.0

    def pytest_sessionstart(self) -> None:
        from django.db.backends.utils import CursorWrapper

        for name in ("_execute", "_executemany"):
            setattr(CursorWrapper, name, self.recording(getattr(CursorWrapper, name)))

    def recording(self, execute: Any) -> Any:
        def recording(cursor: Any, sql: Any, *arguments: Any) -> Any:
            if _ROWS.match(str(sql)):
                self.sent.add(without_values(str(sql)))
            return execute(cursor, sql, *arguments)

        return recording

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._begin()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        result = yield
        if fixturedef.argname == "django_db_setup":
            self._begin()
        return result

    def _begin(self) -> None:
        self._began = sum(used_s())
        self.sent.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            cpu_s = sum(used_s()) - self._began
            report.user_properties.append(("sent", [cpu_s, sorted(self.sent)]))
        return report


class Report:
    """Writes what all worker processes recorded."""

    def __init__(self, target: Path) -> None:
        self._target = target
        target.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "sent" and report.when == "teardown":
                with self._target.open("a") as file:
                    file.write(json.dumps([report.nodeid, *value]) + "\n")


def read(path: Path) -> dict[str, Sent]:
    """Return what each test function sent."""
    tests: dict[str, Sent] = {}
    for line in path.read_text().splitlines():
        test, cpu_s, statements = json.loads(line)
        sent = tests.setdefault(test.partition("[")[0], Sent())
        sent.cpu_s += float(cpu_s)
        sent.statements.update(statements)
    return tests


def main(path: str) -> None:
    tests = read(Path(path))
    every = set[str]().union(*(sent.statements for sent in tests.values()))
    named = set(selected())
    first = [name for name in tests if {name, name.partition("::")[0]} & named]
    added = cheapest(tests, first)
    for label, names in (("all", list(tests)), ("selected", first), ("proposed", first + added)):
        sent = set[str]().union(*(tests[name].statements for name in names))
        cpu_s = sum(tests[name].cpu_s for name in names)
        print(
            f"{label}: {len(names)} tests, {len(sent)} of {len(every)} statements, {cpu_s:.0f} s",
            file=sys.stderr,
        )
    print(*sorted(added), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
