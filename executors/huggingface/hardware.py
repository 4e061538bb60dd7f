"""Flavours of Hugging Face Jobs.

The prices below are for estimates without a token. The Hub returns current ones
(``GET /api/jobs/hardware``, :meth:`executors.huggingface.executor.HFJobsExecutor.hardware`), which
:func:`table_of` converts to the same kind of table.

Sizes are those of the whole flavour. The Hub's "GB" are GiB in its containers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from executors.catalogue import Hardware, Table

if TYPE_CHECKING:
    from huggingface_hub import JobHardwareInfo

BACKEND = "huggingface"

# name, label of the Hub, GPU, number of GPUs, GPU memory, virtual CPUs, memory, USD per hour
_FLAVOURS: tuple[tuple[str, str, str, int, float | None, float, float, float], ...] = (
    ("cpu-basic", "CPU Basic", "", 0, None, 2, 16, 0.01),
    ("cpu-upgrade", "CPU Upgrade", "", 0, None, 8, 32, 0.03),
    ("cpu-xl", "CPU XL", "", 0, None, 16, 124, 1.00),
    ("cpu-performance", "CPU Performance", "", 0, None, 32, 256, 1.90),
    ("t4-small", "Nvidia T4 - small", "T4", 1, 16, 4, 15, 0.40),
    ("t4-medium", "Nvidia T4 - medium", "T4", 1, 16, 8, 30, 0.60),
    ("l4x1", "1x Nvidia L4", "L4", 1, 24, 8, 30, 0.80),
    ("l4x4", "4x Nvidia L4", "L4", 4, 96, 48, 186, 3.80),
    ("l40sx1", "1x Nvidia L40S", "L40S", 1, 48, 8, 62, 1.80),
    ("l40sx4", "4x Nvidia L40S", "L40S", 4, 192, 48, 382, 8.30),
    ("l40sx8", "8x Nvidia L40S", "L40S", 8, 384, 192, 1534, 23.50),
    ("a10g-small", "Nvidia A10G - small", "A10G", 1, 24, 4, 15, 1.00),
    ("a10g-large", "Nvidia A10G - large", "A10G", 1, 24, 12, 46, 1.50),
    ("a10g-largex2", "2x Nvidia A10G - large", "A10G", 2, 48, 24, 92, 3.00),
    ("a10g-largex4", "4x Nvidia A10G - large", "A10G", 4, 96, 48, 184, 5.00),
    ("a100-large", "Nvidia A100 - large", "A100", 1, 80, 12, 142, 2.50),
    ("a100x4", "4x Nvidia A100", "A100", 4, 320, 48, 568, 10.00),
    ("a100x8", "8x Nvidia A100", "A100", 8, 640, 96, 1136, 20.00),
    ("h200", "Nvidia H200", "H200", 1, 141, 23, 256, 5.00),
    ("h200x2", "2x Nvidia H200", "H200", 2, 282, 46, 512, 10.00),
    ("h200x4", "4x Nvidia H200", "H200", 4, 564, 92, 1024, 20.00),
    ("h200x8", "8x Nvidia H200", "H200", 8, 1128, 184, 2048, 40.00),
    ("rtx-pro-6000", "Nvidia RTX PRO 6000", "RTX PRO 6000", 1, 96, 23, 256, 2.75),
    ("rtx-pro-6000x2", "2x Nvidia RTX PRO 6000", "RTX PRO 6000", 2, 192, 46, 512, 5.50),
    ("rtx-pro-6000x4", "4x Nvidia RTX PRO 6000", "RTX PRO 6000", 4, 384, 92, 1024, 11.00),
    ("rtx-pro-6000x8", "8x Nvidia RTX PRO 6000", "RTX PRO 6000", 8, 768, 184, 2048, 22.00),
)

TABLE = Table(
    backend=BACKEND,
    hardware=tuple(
        Hardware(
            backend=BACKEND,
            name=name,
            label=label,
            gpu=gpu,
            gpus=gpus,
            gpu_memory_gib=gpu_memory,
            cpus=cpus,
            memory_gib=memory,
            price_usd_h=price,
        )
        for name, label, gpu, gpus, gpu_memory, cpus, memory, price in _FLAVOURS
    ),
    read_on="2026-08-22",
    source="https://huggingface.co/docs/hub/jobs-pricing",
)

_HOURS = {"second": 3600, "minute": 60, "hour": 1}


def table_of(flavours: Iterable[JobHardwareInfo], *, read_on: str, source: str) -> Table:
    """A table of the result of ``HfApi.list_jobs_hardware``. Missing values are None."""
    return Table(
        backend=BACKEND,
        hardware=tuple(_hardware(info) for info in flavours),
        read_on=read_on,
        source=source,
    )


def _hardware(info: JobHardwareInfo) -> Hardware:
    gpu = info.accelerator
    count = _number(gpu.quantity) if gpu else None
    units_per_hour = _HOURS.get(info.unit_label)
    return Hardware(
        backend=BACKEND,
        name=info.name,
        label=info.pretty_name,
        gpu=gpu.model if gpu else "",
        gpus=int(count or 1) if gpu else 0,
        gpu_memory_gib=_number(gpu.vram) if gpu else None,
        cpus=_number(info.cpu),
        memory_gib=_number(info.ram),
        price_usd_h=None
        if units_per_hour is None
        else round(info.unit_cost_usd * units_per_hour, 2),
    )


def _number(text: str | int | float | None) -> float | None:
    """The number in ``16 GB`` or ``2 vCPU``."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)", str(text))
    return float(match[1]) if match else None
