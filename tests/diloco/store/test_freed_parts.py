"""Freed parts of many threads leave the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.store.base import PART_BYTES

PROGRAM = f"""
import sys, threading
from pathlib import Path
from diloco.store.open import open_store


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("VmRSS:")]
    return 1024 * int(found.split()[1])


def use_parts():
    for _ in range(3):
        parts = [bytearray(b"x") * {PART_BYTES} for _ in range(2)]


for folder in sys.argv[1:]:
    open_store(folder)
large = bytearray(2 * {PART_BYTES})
del large  # by default, only larger allocations have pages of their own from here on
before = resident()
for _ in range(6):
    threads = [threading.Thread(target=use_parts) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(resident() - before)
"""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only the malloc of glibc keeps freed parts"
)


def kept_bytes(*folders: Path, **environment: str) -> int:
    """Return the bytes that a process, which opens ``folders``, keeps after four threads have used
    and freed parts."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        env=inherited | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def test_a_process_that_opens_a_store_returns_the_memory_of_freed_parts(tmp_path: Path) -> None:
    assert kept_bytes() >= PART_BYTES  # glibc's default
    assert kept_bytes(tmp_path) < PART_BYTES


@pytest.mark.parametrize(
    "setting", [{"MALLOC_ARENA_MAX": "16"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=16"}]
)
def test_settings_for_malloc_in_the_environment_are_left_alone(
    tmp_path: Path, setting: dict[str, str]
) -> None:
    assert kept_bytes(tmp_path, **setting) >= PART_BYTES
