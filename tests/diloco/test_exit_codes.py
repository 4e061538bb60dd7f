"""The end of a replica's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_ENDS = """
import atexit, threading
from diloco.exit_codes import end_process
atexit.register(print, "atexit")
threading.Thread(target=threading.Event().wait, name="hanging request").start()
print("before")
end_process(75)
"""


def test_a_process_ends_with_its_code_whatever_its_threads_do() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 75, ended.stderr
    assert ended.stdout.split() == ["before", "atexit"]


_WRITES_IN_C = """
import ctypes
from diloco.exit_codes import end_process
ctypes.CDLL(None).printf(b"a line of a C library\\n")
end_process(75)
"""


def test_the_output_of_c_libraries_is_written() -> None:
    ended = run(_WRITES_IN_C, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (75, b"a line of a C library\n")


_FAILS = """
import sys
from diloco.exit_codes import end_process, exit_code_of
from diloco.store.base import StoreUnavailable
def work():
    raise {error}
end_process(exit_code_of(work, verbose={verbose}))
"""


@pytest.mark.parametrize(
    ("error", "code", "verbose", "unbuffered"),
    [
        ("StoreUnavailable('gone')", 75, False, "1"),
        ("StoreUnavailable('gone')", 75, True, ""),
        ("TypeError('a bug')", 1, False, ""),
    ],
)
def test_the_code_is_that_of_the_error_if_standard_error_is_closed(
    error: str, code: int, verbose: bool, unbuffered: str
) -> None:
    """The reader of a pipe has ended, such as head or a log collector."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        text = _FAILS.format(error=error, verbose=verbose)
        ended = run(text, stdout=writer, stderr=writer, unbuffered=unbuffered)
    finally:
        os.close(writer)
    assert ended.returncode == code


def run(
    text: str, *, stdout: int, stderr: int = subprocess.PIPE, unbuffered: str = ""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", text],
        stdout=stdout,
        stderr=stderr,
        timeout=120,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
