"""Names of the series that describe a replica's machine."""

from __future__ import annotations

SYSTEM_SERIES = ("gpu_busy", "gpu_memory_bytes", "rss_bytes", "cpu_cores")
"""By segment, under the names that :mod:`diloco.telemetry.system_metrics` gives them."""


TRANSFER_SERIES = ("bytes_up", "bytes_down", "up_bytes_per_s", "down_bytes_per_s")
"""By round: moved to and from the bucket, and how fast while it was moved."""


NEWEST = ("gpu_busy", "gpu_memory_bytes", "up_bytes_per_s", "down_bytes_per_s")
"""Of which a replica's row has the newest point, in a column of the name."""
