"""The commands fleet and spend against a live server."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archipelago import fleet_commands
from tests.browser import seed, seed_fleet, seed_spend

pytestmark = pytest.mark.django_db(transaction=True)

Call = Callable[..., Any]


@pytest.fixture
def mixed(signed_in: str) -> Any:
    run = seed_fleet.mixed(seed.user("olga", "operator"))
    seed_spend.orphans(run)
    return run


def test_fleet(call: Call, mixed: Any) -> None:
    result = call("fleet")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:3] == ["RUN", "REPLICA", "NAME"]
    assert len([line for line in lines if line.startswith(str(mixed.pk)[:8])]) == 10
    assert any(line.split() == ["Modal", "3", "3", "$11.85"] for line in lines)
    assert any(line.startswith("total") and ">$" in line for line in lines)
    assert "action required: You have exceeded your current quota" in result.out
    assert "no attempt has its launch key, bill unknown" in result.out
    assert "its attempt has ended, bill $8.00" in result.out


def test_fleet_filters_and_json(call: Call, mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.loads(call("fleet", "--backend", "modal", "--json").out)
    assert {job["backend"] for job in body["jobs"]} == {"modal"}
    some = call("fleet", "-n", "2")
    assert some.err == "the first 2 of 10 jobs\n"
    monkeypatch.setattr(fleet_commands, "MOST", 3)
    whole = json.loads(call("fleet", "--all", "--json").out)
    assert (len(whole["jobs"]), whole["next"]) == (10, None)
    assert call("fleet", "--owner", "nora").err == "no live jobs\n"


def test_fleet_sends_no_escape_sequences(call: Call, mixed: Any) -> None:
    type(mixed).objects.update(name="\x1b[2Jevil\nrun")
    mixed.pools.update(last_error="\x1b[2J", region="\x1b[2J")
    assert "\x1b" not in call("fleet").out


def test_spend(call: Call, signed_in: str) -> None:
    run = seed.run(seed.user("owner", "operator"), name="Priced", replicas=1, committed=1)
    seed_spend.history(run, days=3, price=2.0, backend="modal", tags=["paper"])
    other = seed.run(seed.user("oscar", "operator"), name="Unpriced", replicas=1, committed=1)
    seed_spend.history(other, days=1, price=None, backend="kubernetes", tags=[])
    result = call("spend")
    assert result.code == 0, result.err
    assert "rate now" in result.out
    assert ">$2.00 an hour" in result.out
    rows = {line.split()[0]: line.split()[-1] for line in result.out.splitlines() if line}
    assert rows["Kubernetes"] == "unknown"
    assert rows["Modal"].startswith("$")
    assert "whose cost is missing: 1" in result.err
    for by, text in (("owner", "oscar"), ("run", "Priced"), ("tag", "paper"), ("day", "20")):
        assert text in call("spend", "--by", by).out
    assert len(call("spend", "--by", "day", "--days", "30").out.splitlines()) > 30
    body = json.loads(call("spend", "--owner", "owner", "--json").out)
    assert [group["label"] for group in body["runs"]] == ["Priced"]


def test_spend_as_a_file(call: Call, signed_in: str, tmp_path: Path) -> None:
    run = seed.run(seed.user("owner", "operator"), name="Priced", replicas=1, committed=1)
    seed_spend.history(run, days=3, price=2.0, backend="modal", tags=["paper"])
    path = tmp_path / "spend.csv"
    result = call("spend", "--owner", "owner", "-o", str(path))
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith(f"{path}: ")
    rows = {row["by"]: row for row in csv.DictReader(path.open())}
    assert rows["run"]["name"] == "Priced"
    assert rows["run"]["usd"] == rows["owner"]["usd"] == rows["total"]["usd"] != ""
    assert call("spend", "--format", "csv", "--owner", "nora").out.startswith("by,key,name,jobs,")
    assert call("spend", "-o", str(path.with_suffix(".parquet"))).code == 0
    assert path.with_suffix(".parquet").read_bytes()[:4] == b"PAR1"
    assert call("spend", "-o", str(path), "--json").code != 0
    assert "a file has all groups" in call("spend", "-o", str(path), "--by", "run").err


def test_spend_names_a_wrong_day(call: Call, signed_in: str) -> None:
    result = call("spend", "--from", "soon")
    assert result.code == 6
    assert "from" in result.err
    assert call("spend", "--from", "2026-01-01", "--days", "3").code == 2
