"""Makes the C library return the memory of freed parts to the system.

glibc gives a large allocation separate pages, which are returned when it is freed. The size from
which it does so grows with what is freed, up to 32 MiB; below, freed memory is kept for later
allocations of the same threads (mallopt(3), ``M_MMAP_THRESHOLD``). Parts pass through many threads,
so that a process would keep several times as many parts as it has in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache

from diloco.store.base import PART_BYTES

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, from ``malloc.h``."""
KEPT_BYTES = 4 * PART_BYTES
"""Free memory at the end of an arena from which it is returned, as glibc has it once parts of its
largest threshold have been freed."""


@cache
def return_freed_parts() -> None:
    """Give parts separate pages from now on, once per process.

    Changes nothing if the environment has settings for malloc (``MALLOC_...``, ``GLIBC_TUNABLES``),
    and with C libraries other than glibc.
    """
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    ):
        return
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_THRESHOLD, PART_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)
