"""Expected errors are one line with the remedy; ``-v`` shows the traceback."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import weakref
from pathlib import Path

import pytest
import torch
from fsspec.registry import _registry
from torch import nn

import diloco
from diloco.error_lines import error_line, in_one_line
from diloco.errors import FencedOut, ReplicaError
from diloco.exit_codes import EX_CONFIG, EX_TEMPFAIL, exit_code_of
from diloco.store.base import StoreDenied, StoreUnavailable
from diloco.store.open import open_store

URI = "s3://bucket/run"


def failing(error: Exception) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            StoreDenied("group.json: 403 AccessDenied"),
            EX_CONFIG,
            "error: group.json: 403 AccessDenied. Check the URI and the credentials "
            f"(AWS_ACCESS_KEY_ID, ...). Test the bucket with python -m diloco.preflight {URI}\n",
        ),
        (
            StoreUnavailable("connection\nrefused"),
            EX_TEMPFAIL,
            "error: connection refused. Check the network, that the server runs, and the endpoint "
            f"(AWS_ENDPOINT_URL). Test the bucket with python -m diloco.preflight {URI}\n",
        ),
        (ReplicaError("expected a, found b"), EX_CONFIG, "error: expected a, found b\n"),
        (FencedOut("a newer process"), EX_CONFIG, "fenced out: a newer process\n"),
    ],
)
def test_an_expected_error_is_one_line(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(lambda: failing(error), uri=URI) == code
    assert capsys.readouterr().err == line


def test_verbose_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code_of(lambda: failing(ReplicaError("expected a, found b")), verbose=True)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n") and "in failing" in shown
    assert shown.endswith("\nerror: expected a, found b\n")


def test_an_unexpected_exception_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: failing(TypeError("a bug"))) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize("command", ["generate", "init", "inspect", "replica", "syncer"])
@pytest.mark.parametrize("verbose", [False, True])
def test_every_command_prints_one_line(
    command: str,
    verbose: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPLICA_RANK", "0")
    arguments = ["s4://bucket/run", *(["-v"] if verbose else [])]
    assert importlib.import_module(f"diloco.{command}").main(arguments) > 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and "Enter a URI such as s3://bucket/run" in lines[-1]
    assert (len(lines) > 1 and lines[0].startswith("Traceback")) is verbose
    assert verbose or len(lines) == 1


def test_a_missing_client_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)  # classes that an earlier test imported
    with pytest.raises(StoreDenied, match=r"run pip install 'archipelago-diloco\[gcs\]'$") as error:
        open_store("gs://bucket/run")
    with pytest.raises(StoreDenied), in_one_line(URI):
        raise error.value
    assert "AWS_" not in error_line(error.value), "its message has the remedy"


# -- a program that calls join ---------------------------------------------------------------------


@pytest.fixture
def _as_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def refused(folder: Path) -> ReplicaError:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ReplicaError) as error:
        diloco.join(str(folder), model, optimizer)
    return error.value


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.mark.usefixtures("_as_in_a_program")
def test_a_refused_join_ends_a_program_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(tmp_path)
    assert printed(error, capsys) == (
        f"error: expected group.json under {tmp_path.as_uri()}, found none. Check the URI, create "
        "the group with python -m diloco.init, or pass settings to diloco.join\n"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "-v"])
    assert printed(error, capsys).startswith("Traceback (most recent call last):\n")


@pytest.mark.usefixtures("_as_in_a_program")
def test_every_other_exception_of_the_program_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(tmp_path)
    assert "Traceback" in printed(failure(ReplicaError("later")), capsys)


@pytest.mark.usefixtures("_as_in_a_program")
def test_a_handled_error_keeps_no_model_in_memory(tmp_path: Path) -> None:
    def attempt() -> weakref.ref[nn.Module]:
        model = nn.Linear(1, 1)
        with contextlib.suppress(ReplicaError):
            diloco.join(str(tmp_path), model, torch.optim.SGD(model.parameters(), lr=0.1))
        return weakref.ref(model)

    found = attempt()
    gc.collect()
    assert found() is None


def failure(error: Exception) -> Exception:
    with pytest.raises(type(error)):
        failing(error)
    return error


@pytest.mark.usefixtures("_as_in_a_program")
def test_a_programs_own_hook_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", own := lambda *_: None)
    refused(tmp_path)
    assert sys.excepthook is own
