"""Worker processes of ``pytest -n`` that are forks of one process, which collects the tests once.

Importing all tests and what they import takes 18 seconds of CPU, so on Linux the workers share it:

- :func:`collector` starts the collector, a pytest process that waits after its collection, and
  changes what xdist starts as a worker to :mod:`tests.worker_launcher`.
- The launcher sends its standard streams to the collector through a Unix socket.
- The collector forks. The child takes over these streams, on which xdist speaks to it, and reports
  the shared collection as its own. It ends with its launcher, and the launcher with it.

If the tests cannot be collected the collector ends. The launchers then become ordinary workers,
which report the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _pytest.config
import pytest

from tests.worker_launcher import STREAMS

_after_fork: list[Callable[[], None]] = []


def after_fork(function: Callable[[], None]) -> None:
    """Call ``function`` in each worker that is a fork, before it runs tests."""
    _after_fork.append(function)


@contextlib.contextmanager
def collector(
    config: pytest.Config, specs: Sequence[Any], folder: Path, worker_input: dict[str, Any]
) -> Iterator[None]:
    """Collect once for the workers of ``specs``, with these entries of ``workerinput``."""
    if sys.platform != "linux" or len(specs) < 2 or not all(spec.popen for spec in specs):
        yield
        return
    address = folder / "workers"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        arguments = [str(argument) for argument in config.invocation_params.args]
        given = json.dumps([listener.fileno(), arguments, sys.path, worker_input])
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import collect; collect()", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    launcher = [sys.executable, "-S", "-E", str(Path(__file__).with_name("worker_launcher.py"))]
    for spec in specs:
        spec.python = shlex.join([*launcher, str(address)])
    try:
        yield
    finally:
        process.communicate()


def collect() -> None:
    """Be the collector."""
    end = os.dup(0)  # pytest captures standard input
    listener, arguments, path, worker_input = json.loads(sys.argv[1])
    sys.path[:] = path
    config = _pytest.config._prepareconfig(arguments)
    from xdist.remote import setup_config

    setup_config(config, None)
    config.workerinput = worker_input  # type: ignore[attr-defined]
    config.pluginmanager.register(Collector(socket.socket(fileno=listener), end))
    sys.exit(config.hook.pytest_cmdline_main(config=config))


class Collector:
    """Forks a worker for each connection, until the controller closes ``end``."""

    def __init__(self, listener: socket.socket, end: int) -> None:
        self._listener, self._end = listener, end
        self._warnings: list[dict[str, Any]] = []

    def pytest_warning_recorded(
        self, warning_message: Any, when: Any, nodeid: str, location: Any
    ) -> None:
        self._warnings.append(
            {
                "warning_message": warning_message,
                "when": when,
                "nodeid": nodeid,
                "location": location,
            }
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while not session.testsfailed and (connection := self._accepted()):
            if os.fork() == 0:
                self._listener.close()
                session.config.pluginmanager.unregister(self)
                try:
                    become_worker(session, self._warnings, connection)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
            connection.close()
        return True

    def _accepted(self) -> socket.socket | None:
        ready, _, _ = select.select([self._listener, self._end], [], [])
        return None if self._end in ready else self._listener.accept()[0]


def become_worker(
    session: pytest.Session, warnings: list[dict[str, Any]], connection: socket.socket
) -> None:
    """Be a worker on the streams of the launcher at the other end of ``connection``."""
    from tests import parallel  # imports xdist, which pytest imports first in the collector

    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    _, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
    for stream, number in zip(streams, STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    connection.send(b"+")
    parallel.end_with_controller()
    threading.Thread(target=_end_with_launcher, args=[connection], daemon=True).start()
    for function in _after_fork:
        function()
    # The program that xdist sends prepares a configuration, then calls pytest_cmdline_main.
    _pytest.config._prepareconfig = lambda *_: config
    config.pluginmanager.register(ForkedWorker(session, warnings))
    with open(0, closefd=False) as program:
        source = eval(program.readline())
    exec(source, {"__name__": "execnet_worker"})
    atexit._run_exitfuncs()
    os._exit(0)


def _end_with_launcher(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


class ForkedWorker:
    """Runs a session that has been collected."""

    def __init__(self, session: pytest.Session, warnings: list[dict[str, Any]]) -> None:
        self._session, self._warnings = session, warnings

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        session, hook = self._session, config.hook
        to_controller: Any = next(
            plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "sendevent")
        )
        config._tmp_path_factory = pytest.TempPathFactory.from_config(config, _ispytest=True)  # type: ignore[attr-defined]
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.start_global_capturing()
        capture.suspend_global_capture()
        status = pytest.ExitCode.OK
        try:
            to_controller.pytest_sessionstart(session)
            for warning in self._warnings:
                to_controller.pytest_warning_recorded(**warning)
            to_controller.pytest_collection_finish(session)
            hook.pytest_runtestloop(session=session)
            if session.testsfailed:
                status = pytest.ExitCode.TESTS_FAILED
        except (KeyboardInterrupt, pytest.exit.Exception):
            status = pytest.ExitCode.INTERRUPTED
            hook.pytest_keyboard_interrupt(excinfo=pytest.ExceptionInfo.from_current())
        except BaseException:
            status = pytest.ExitCode.INTERNAL_ERROR
            config.notify_exception(pytest.ExceptionInfo.from_current(), config.option)
        finally:
            os.chdir(session.startpath)
            hook.pytest_sessionfinish(session=session, exitstatus=status)
            config._ensure_unconfigure()
        return status
