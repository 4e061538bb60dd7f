"""The end of a replica's process."""

from __future__ import annotations

import subprocess
import sys

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
