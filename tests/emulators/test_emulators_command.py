"""``python -m tests.emulators``: a backend in a separate process, configured by its output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from executors.base import Cause, ExecutorConfig
from executors.registry import BACKENDS as EXECUTORS
from executors.registry import get_executor
from tests.emulators.__main__ import BACKENDS, main
from tests.executors.harnesses import LIMIT_S, is_gone, launch, number_in, wait_for
from tests.matrix import matrix

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]


def test_every_remote_backend_has_one() -> None:
    assert ["local", *BACKENDS] == list(EXECUTORS)


@matrix("backend", BACKENDS, fast=1)
def test_the_printed_configuration_connects_an_executor(backend: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.emulators", backend, "--state", tmp_path / "state"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        text = json.loads(process.stdout.readline())
        executor = get_executor(
            backend, ExecutorConfig(credentials=text["credentials"], options=text["options"])
        )
        handle = launch(executor, "wait", tmp_path / "up")
        pid = number_in(tmp_path / "up")
        quota = urllib.request.Request(
            f"{text['url']}/_emulator/refuse_quota", b'{"message": "no more"}', method="POST"
        )
        urllib.request.urlopen(quota, timeout=LIMIT_S).close()
        with pytest.raises(Exception, match="no more"):
            launch(executor, "wait", tmp_path / "other", key="run-1-1")
        executor.cancel([handle])
        (status,) = executor.collect([handle], LIMIT_S)
        assert status.cause is Cause.CANCELLED
        assert is_gone(pid)
        left = launch_again(executor, text["url"], tmp_path)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    wait_for(lambda: is_gone(left), "its jobs to end with it")


def launch_again(executor: object, url: str, tmp_path: Path) -> int:
    """The process id of a job that keeps running."""
    allow = urllib.request.Request(
        f"{url}/_emulator/refuse_quota", b'{"message": null}', method="POST"
    )
    urllib.request.urlopen(allow, timeout=LIMIT_S).close()
    launch(executor, "wait", tmp_path / "left", key="run-2-1")  # type: ignore[arg-type]
    return number_in(tmp_path / "left")


def test_a_port_in_use_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["huggingface", "--port", str(port), "--state", str(tmp_path)]) == 1
    for number, handler in before.items():
        signal.signal(number, handler)
    assert f"port {port}: Address already in use" in capsys.readouterr().err
