"""The memory of a freed part leaves the process, even if that of a later part is in use."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.store.base import PART_BYTES

PROGRAM = f"""
import sys
from pathlib import Path
from diloco.store.open import open_store


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("VmRSS:")]
    return 1024 * int(found.split()[1])


for folder in sys.argv[1:]:
    open_store(folder)
large = bytearray({PART_BYTES * 3 // 2})
del large  # by default, only larger allocations have separate pages from here on
before = resident()
part, later = b"x" * {PART_BYTES}, b"y" * {PART_BYTES}
del part
print(resident() - before - len(later))
"""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only the malloc of glibc keeps freed parts"
)


def kept_bytes(*folders: Path, **environment: str) -> int:
    """Return the bytes that a process, which opens ``folders``, keeps of a freed part."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        env=inherited | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def test_a_process_that_opens_a_store_returns_the_memory_of_a_freed_part(tmp_path: Path) -> None:
    assert kept_bytes() > PART_BYTES / 2  # glibc's default
    assert kept_bytes(tmp_path) < PART_BYTES / 2


@pytest.mark.parametrize(
    "setting", [{"MALLOC_ARENA_MAX": "16"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=16"}]
)
def test_settings_for_malloc_in_the_environment_are_left_alone(
    tmp_path: Path, setting: dict[str, str]
) -> None:
    assert kept_bytes(tmp_path, **setting) > PART_BYTES / 2
