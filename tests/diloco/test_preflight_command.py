"""Preflight on good and bad buckets; it leaves no objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco import preflight as module
from diloco.preflight import main, preflight
from diloco.store.base import LocalStore, StoreDenied
from diloco.store.open import open_store

EVERYTHING = [
    "write",
    "read",
    "read a range",
    "list",
    "write in parts",
    "create",
    "refuse to create twice",
    "let one of many create",
    "delete",
]


@pytest.mark.parametrize("fixture", ["tmp_path", "s3_uri", "gcs_uri", "azure_uri"])
def test_a_good_bucket_passes_and_is_left_clean(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    uri = str(request.getfixturevalue(fixture))
    report = preflight(uri)
    assert report.ok, report.missing
    assert [check.name for check in report.checks] == EVERYTHING
    assert open_store(uri).list("") == []


def test_the_hub_fails_only_the_create_check(hub_uri: str) -> None:
    report = preflight(hub_uri)
    assert [check.name for check in report.missing] == [
        "create",
        "refuse to create twice",
        "let one of many create",
    ]
    assert "coordinator" in report.missing[0].detail
    assert "skipped without: create" in report.missing[1].detail
    assert open_store(hub_uri).list("") == []


def test_quick_skips_the_large_object_and_the_race(tmp_path: Path) -> None:
    names = [check.name for check in preflight(str(tmp_path), quick=True).checks]
    assert names == [n for n in EVERYTHING if n not in ("write in parts", "let one of many create")]


@pytest.mark.parametrize(
    ("verb", "missing"),
    [
        ("put", set(EVERYTHING)),
        ("get", {"read", "let one of many create"}),
        ("get_range", {"read a range", "write in parts"}),
        ("list", {"list", "delete"}),
        ("put_stream", {"write in parts"}),
        ("create", {"create", "refuse to create twice", "let one of many create"}),
        ("delete", {"delete"}),
    ],
)
def test_a_denied_request_is_named_and_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, missing: set[str]
) -> None:
    def denied(*args: Any) -> None:
        raise StoreDenied("policy forbids it")

    monkeypatch.setattr(LocalStore, verb, denied)
    report = preflight(str(tmp_path))
    assert {check.name for check in report.missing} == missing
    first = report.missing[0]
    assert (first.detail, bool(first.needs)) == ("policy forbids it", True)


def test_a_non_atomic_create_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CheckThenWrite(LocalStore):
        def create(self, key: str, data: Any) -> bool:
            new = not (self.root / key).exists()
            if "race" in key:
                return True  # as if all had checked before any wrote
            self.put(key, data)
            return new

    monkeypatch.setattr(module, "open_store", lambda uri, **_: CheckThenWrite(Path(uri)))
    [problem] = preflight(str(tmp_path)).missing
    assert problem.name == "let one of many create"
    assert problem.detail == "expected 1 winner of 8 racing creates, found 8"
    assert "conditional writes" in problem.needs


def test_a_denied_request_names_the_missing_permission(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert main([s3_uri]) == 1
    output = capsys.readouterr().out
    assert "SignatureDoesNotMatch" in output
    assert "needs s3:PutObject" in output


def test_the_command_prints_a_table_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from diloco.preflight import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == tmp_path.as_uri()
    assert [line.split(" ok ")[0].strip() for line in lines[1:]] == EVERYTHING


def test_an_unknown_scheme_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["moon://crater/1"]) == 1
    assert "moon" in capsys.readouterr().out
