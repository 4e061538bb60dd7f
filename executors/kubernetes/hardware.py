"""GPUs of a Kubernetes cluster, by the node labels of NVIDIA's GPU feature discovery.

The table lists the hardware that a pool can *request*; the preflight checks whether a cluster has
such nodes. Prices are unknown unless the overrides of :class:`executors.catalogue.Catalogue` set
them.
"""

from __future__ import annotations

from executors.catalogue import Hardware, Table

PRODUCT_LABEL = "nvidia.com/gpu.product"

PRODUCTS: dict[str, tuple[str, ...]] = {
    "T4": ("Tesla-T4", "NVIDIA-T4"),
    "L4": ("NVIDIA-L4",),
    "A10": ("NVIDIA-A10", "NVIDIA-A10G"),
    "L40S": ("NVIDIA-L40S",),
    "A100-40GB": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "H100": (
        "NVIDIA-H100-80GB-HBM3",
        "NVIDIA-H100-PCIe",
        "NVIDIA-H100-NVL",
    ),
    "H200": ("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "B200": ("NVIDIA-B200",),
}
"""Name of hardware -> accepted values of :data:`PRODUCT_LABEL`. Shared or partitioned GPUs have
other values and need an entry in the option ``hardware``."""

_MEMORY_GIB = {
    "T4": 16,
    "L4": 24,
    "A10": 24,
    "L40S": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
}
_SEVERAL = ("A100-40GB", "A100-80GB", "H100", "H200", "B200")


def _gpu(name: str, count: int) -> Hardware:
    model = "any GPU" if name == "gpu" else name
    each = _MEMORY_GIB.get(name)
    return Hardware(
        backend="kubernetes",
        name=name if count == 1 else f"{name}:{count}",
        label=f"{'One' if count == 1 else count} × {model}",
        gpu="any" if name == "gpu" else name,
        gpus=count,
        gpu_memory_gib=None if each is None else float(each * count),
    )


TABLE = Table(
    backend="kubernetes",
    hardware=(
        Hardware(backend="kubernetes", name="cpu", label="CPU only"),
        *(_gpu("gpu", count) for count in (1, 2, 4, 8)),
        *(
            _gpu(name, count)
            for name in PRODUCTS
            for count in ((1, 2, 4, 8) if name in _SEVERAL else (1,))
        ),
    ),
)
