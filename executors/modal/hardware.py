"""Modal's GPUs, by the values of ``gpu=`` (``H100``, ``H100:8``), and the prices of Sandboxes.

A Sandbox pays for its GPUs, and for cores and memory at the Sandbox rates: the greater of the
request and the use. The prices here are those of the request: one core and 8 GiB per GPU unless
options change it. A core is a physical core, two virtual CPUs. A named region costs more (see
``docs/backends/modal.md``). There is no spot price: Modal can preempt any Sandbox with a GPU.

The rates are those of the page below, as quoted by third parties in that summer.
"""

from __future__ import annotations

from executors.catalogue import Hardware, Table

BACKEND = "modal"

CORE_USD_H = 0.00003942 * 3600
GIB_USD_H = 0.00000667 * 3600
"""Rates of Sandboxes, three times those of functions."""

_CORES_PER_GPU = 1
_GIB_PER_GPU = 8

# Modal's name, USD per second, GPU memory in GiB, maximum per Sandbox
_GPUS: tuple[tuple[str, float, float | None, int], ...] = (
    ("T4", 0.000164, 16, 8),
    ("L4", 0.000222, 24, 8),
    ("A10", 0.000306, 24, 4),
    ("L40S", 0.000542, 48, 8),
    ("A100-40GB", 0.000583, 40, 8),
    ("A100-80GB", 0.000694, 80, 8),
    ("RTX-PRO-6000", 0.000842, 96, 8),
    ("H100", 0.001097, 80, 8),
    ("H200", 0.001261, 141, 8),
    ("B200", 0.001736, 192, 8),
    ("B300", 0.001972, None, 8),
)


def _cpu(name: str, cores: int, gib: int) -> Hardware:
    return Hardware(
        backend=BACKEND,
        name=name,
        label=f"CPU, {cores} cores, {gib} GiB",
        cpus=cores,
        memory_gib=gib,
        price_usd_h=_price(cores, gib, 0.0),
    )


def _gpu(gpu: str, usd_s: float, gpu_gib: float | None, count: int) -> Hardware:
    cores, gib = _CORES_PER_GPU * count, _GIB_PER_GPU * count
    return Hardware(
        backend=BACKEND,
        name=gpu if count == 1 else f"{gpu}:{count}",
        label=f"{count} x {gpu}" if count > 1 else gpu,
        gpu=gpu,
        gpus=count,
        gpu_memory_gib=None if gpu_gib is None else gpu_gib * count,
        cpus=cores,
        memory_gib=gib,
        price_usd_h=_price(cores, gib, usd_s * count),
    )


def _price(cores: float, gib: float, usd_s: float) -> float:
    return round(cores * CORE_USD_H + gib * GIB_USD_H + usd_s * 3600, 4)


TABLE = Table(
    backend=BACKEND,
    hardware=(
        _cpu("cpu", 2, 8),
        _cpu("cpu-8", 8, 32),
        *(
            _gpu(gpu, usd_s, gib, count)
            for gpu, usd_s, gib, most in _GPUS
            for count in (1, 2, 4, 8)
            if count <= most
        ),
    ),
    read_on="2026-08-30",
    source="https://modal.com/pricing",
)
