"""What a replica's process uses of its machine: memory, processor, GPU.

Read once per telemetry segment. A figure that cannot be had is left out, so that nobody takes
"unknown" for 0: resident memory needs ``/proc`` (elsewhere there is only its peak), the GPU's need
a process that computes on one. How busy the GPU is, the driver's own library tells
(``nvmlDeviceGetUtilizationRates``, https://docs.nvidia.com/deploy/nvml-api/), which is there where
the driver is; torch asks the same through a package that not every image has.

Of a replica of several ranks these are the leader's figures. Left out: children of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from diloco.clock import Clock

_STATM = Path("/proc/self/statm")


class Usage:
    """``cpu_s`` and ``gpu_busy`` stand in for the process' own in tests."""

    def __init__(
        self,
        clock: Clock,
        *,
        cpu_s: Callable[[], float] = time.process_time,
        gpu_busy: Callable[[], float | None] | None = None,
    ) -> None:
        self._clock = clock
        self._cpu_s = cpu_s
        self._gpu_busy = gpu_busy or _Nvml().busy
        self._last = (clock.monotonic(), cpu_s())

    def read(self) -> dict[str, float]:
        """``rss_bytes``, ``max_rss_bytes``, ``cpu_s`` in all and ``cpu_cores`` since the last time;
        ``gpu_memory_bytes`` and ``gpu_memory_peak_bytes`` of torch, ``gpu_memory_total_bytes`` and
        ``gpu_busy`` (0 to 1) of the device."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        now, cpu_s = self._clock.monotonic(), self._cpu_s()
        found = {
            "max_rss_bytes": float(peak * (1 if sys.platform == "darwin" else 1024)),
            "cpu_s": cpu_s,
        }
        then, before = self._last
        if now > then:
            found["cpu_cores"] = (cpu_s - before) / (now - then)
            self._last = (now, cpu_s)
        with contextlib.suppress(OSError, ValueError, IndexError):
            found["rss_bytes"] = float(
                int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            )
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["gpu_memory_bytes"] = float(torch.cuda.memory_allocated())
            found["gpu_memory_peak_bytes"] = float(torch.cuda.max_memory_allocated())
            found["gpu_memory_total_bytes"] = float(torch.cuda.mem_get_info()[1])
            busy = self._gpu_busy()
            if busy is not None:
                found["gpu_busy"] = busy
        return found


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Nvml:
    """The driver's library, opened when it is first asked; unknown for good where that fails."""

    def __init__(self) -> None:
        self._handle: ctypes.c_void_p | None = None
        self._library: ctypes.CDLL | None = None
        self._failed = False

    def busy(self) -> float | None:
        """Share of the driver's last sample in which the current device ran a kernel."""
        if self._failed:
            return None
        rates = _Rates()
        if self._library is None and not self._open():
            self._failed = True
            return None
        assert self._library is not None
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)):
            return None
        return float(rates.gpu) / 100

    def _open(self) -> bool:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            # By its UUID: the driver's numbers are not those of CUDA_VISIBLE_DEVICES.
            name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            handle = ctypes.c_void_p()
            found: bool = library.nvmlInit_v2() == 0 and (
                library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0
            )
        except (OSError, AttributeError):
            return False
        self._library, self._handle = library, handle
        return found
