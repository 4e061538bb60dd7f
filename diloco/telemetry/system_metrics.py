"""Resource usage of the replica process: memory, CPU, GPU.

Read once per telemetry segment. A metric that is not available is omitted instead of reported as 0:
resident memory needs ``/proc`` (without it there is only the peak), GPU metrics need a process that
computes on a GPU. GPU utilisation comes from the driver's NVML library
(``nvmlDeviceGetUtilizationRates``, https://docs.nvidia.com/deploy/nvml-api/), which every machine
with a driver has; ``torch.cuda.utilization`` needs a package that many images lack.

In a replica of several ranks these are the metrics of the leader. Child processes are not included.
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
    """Reads the metrics. Tests replace ``cpu_s`` and ``gpu_busy``."""

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
        """Return the metrics that are available.

        Process: ``rss_bytes``, ``max_rss_bytes``, ``cpu_s`` (total) and ``cpu_cores`` (mean since
        the last call). torch: ``gpu_memory_bytes``, ``gpu_memory_peak_bytes``. Device:
        ``gpu_memory_total_bytes``, ``gpu_busy`` (0 to 1).
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        now, cpu_s = self._clock.monotonic(), self._cpu_s()
        metrics = {
            "max_rss_bytes": float(peak * (1 if sys.platform == "darwin" else 1024)),
            "cpu_s": cpu_s,
        }
        then, before = self._last
        if now > then:
            metrics["cpu_cores"] = (cpu_s - before) / (now - then)
            self._last = (now, cpu_s)
        with contextlib.suppress(OSError, ValueError, IndexError):
            metrics["rss_bytes"] = float(
                int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            )
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            metrics["gpu_memory_bytes"] = float(torch.cuda.memory_allocated())
            metrics["gpu_memory_peak_bytes"] = float(torch.cuda.max_memory_allocated())
            metrics["gpu_memory_total_bytes"] = float(torch.cuda.mem_get_info()[1])
            busy = self._gpu_busy()
            if busy is not None:
                metrics["gpu_busy"] = busy
        return metrics


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Nvml:
    """NVML, opened at the first call. If that fails, utilisation stays unknown."""

    def __init__(self) -> None:
        self._handle: ctypes.c_void_p | None = None
        self._library: ctypes.CDLL | None = None
        self._failed = False

    def busy(self) -> float | None:
        """Return the share of NVML's last sample period in which the current device ran a kernel,
        or None if it is unknown."""
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
            # By UUID, because NVML ignores CUDA_VISIBLE_DEVICES when it numbers devices.
            name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            handle = ctypes.c_void_p()
            opened: bool = library.nvmlInit_v2() == 0 and (
                library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0
            )
        except (OSError, AttributeError):
            return False
        self._library, self._handle = library, handle
        return opened
