"""Names of the series with system metrics of a replica's machine."""

from __future__ import annotations

SYSTEM_SERIES = ("gpu_busy", "gpu_memory_bytes", "rss_bytes", "cpu_cores")
"""One point per segment, with the names of :mod:`diloco.telemetry.system_metrics`."""

NEWEST = ("gpu_busy", "gpu_memory_bytes", "up_bytes_per_s", "down_bytes_per_s")
"""Series whose newest point is in a column of the replica's row."""
