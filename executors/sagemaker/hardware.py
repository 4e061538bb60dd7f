"""SageMaker's instance types for training, and their on-demand prices in us-east-1 and us-west-2.

Other regions cost more. The prices are those of AWS's price list for the component Training, as
quoted by public tables (g5, g6, g6e, m5, p4, p5: 2026-08 and 2026-09); types without a price are
missing there. A managed spot job pays the same price for fewer seconds, which SageMaker reports
after the job's end (``ReplicaStatus.billed_s``): until then the estimate is an upper bound.
"""

from __future__ import annotations

from executors.catalogue import Hardware, Table

BACKEND = "sagemaker"

# Type, virtual CPUs, GiB, GPU, number of GPUs, GiB per GPU, USD per hour
_TYPES: tuple[tuple[str, int, int | None, str, int, int, float | None], ...] = (
    ("ml.m5.large", 2, 8, "", 0, 0, 0.115),
    ("ml.m5.xlarge", 4, 16, "", 0, 0, 0.23),
    ("ml.m5.2xlarge", 8, 32, "", 0, 0, 0.461),
    ("ml.m5.4xlarge", 16, 64, "", 0, 0, 0.922),
    ("ml.c5.xlarge", 4, 8, "", 0, 0, 0.204),
    ("ml.c5.2xlarge", 8, 16, "", 0, 0, 0.408),
    ("ml.g4dn.xlarge", 4, 16, "T4", 1, 16, 0.7364),
    ("ml.g4dn.2xlarge", 8, 32, "T4", 1, 16, 0.94),
    ("ml.g4dn.12xlarge", 48, 192, "T4", 4, 16, None),
    ("ml.g5.xlarge", 4, 16, "A10G", 1, 24, 1.408),
    ("ml.g5.2xlarge", 8, 32, "A10G", 1, 24, 1.515),
    ("ml.g5.4xlarge", 16, 64, "A10G", 1, 24, 2.03),
    ("ml.g5.8xlarge", 32, 128, "A10G", 1, 24, 3.06),
    ("ml.g5.16xlarge", 64, 256, "A10G", 1, 24, 5.12),
    ("ml.g5.12xlarge", 48, 192, "A10G", 4, 24, 7.09),
    ("ml.g5.24xlarge", 96, 384, "A10G", 4, 24, 10.18),
    ("ml.g5.48xlarge", 192, 768, "A10G", 8, 24, 20.36),
    ("ml.g6.xlarge", 4, 16, "L4", 1, 24, 1.127),
    ("ml.g6.2xlarge", 8, 32, "L4", 1, 24, 1.222),
    ("ml.g6.4xlarge", 16, 64, "L4", 1, 24, 1.654),
    ("ml.g6.8xlarge", 32, 128, "L4", 1, 24, 2.518),
    ("ml.g6.12xlarge", 48, 192, "L4", 4, 24, 5.752),
    ("ml.g6.24xlarge", 96, 384, "L4", 4, 24, 8.344),
    ("ml.g6.48xlarge", 192, 768, "L4", 8, 24, 16.688),
    ("ml.g6e.xlarge", 4, 32, "L40S", 1, 48, 2.61),
    ("ml.g6e.2xlarge", 8, 64, "L40S", 1, 48, 2.8),
    ("ml.g6e.4xlarge", 16, 128, "L40S", 1, 48, 3.76),
    ("ml.g6e.8xlarge", 32, 256, "L40S", 1, 48, 5.66),
    ("ml.g6e.12xlarge", 48, 384, "L40S", 4, 48, 13.12),
    ("ml.g6e.24xlarge", 96, 768, "L40S", 4, 48, 18.83),
    ("ml.g6e.48xlarge", 192, 1536, "L40S", 8, 48, 37.66),
    ("ml.g7e.2xlarge", 8, None, "RTX PRO 6000", 1, 96, None),
    ("ml.g7e.12xlarge", 48, None, "RTX PRO 6000", 2, 96, None),
    ("ml.g7e.24xlarge", 96, None, "RTX PRO 6000", 4, 96, None),
    ("ml.g7e.48xlarge", 192, None, "RTX PRO 6000", 8, 96, None),
    ("ml.p4d.24xlarge", 96, 1152, "A100", 8, 40, 25.251286),
    ("ml.p4de.24xlarge", 96, 1152, "A100", 8, 80, 31.5641075),
    ("ml.p5.4xlarge", 16, 256, "H100", 1, 80, None),
    ("ml.p5.48xlarge", 192, 2048, "H100", 8, 80, 63.296),
    ("ml.p5e.48xlarge", 192, 2048, "H200", 8, 141, None),
    ("ml.p5en.48xlarge", 192, 2048, "H200", 8, 141, None),
    ("ml.p6-b200.48xlarge", 192, 2048, "B200", 8, 180, None),
)


def _hardware(
    name: str,
    cpus: int,
    gib: int | None,
    gpu: str,
    gpus: int,
    gpu_gib: int,
    usd_h: float | None,
) -> Hardware:
    machine = f"{cpus} vCPU" if gib is None else f"{cpus} vCPU, {gib} GiB"
    return Hardware(
        backend=BACKEND,
        name=name,
        label=f"{name}: {gpus} x {gpu}, {machine}" if gpus else f"{name}: {machine}",
        gpu=gpu,
        gpus=gpus,
        gpu_memory_gib=gpu_gib * gpus if gpus else None,
        cpus=cpus,
        memory_gib=gib,
        price_usd_h=usd_h,
        spot_price_usd_h=usd_h,
    )


TABLE = Table(
    backend=BACKEND,
    hardware=tuple(_hardware(*row) for row in _TYPES),
    read_on="2026-11-21",
    source="https://aws.amazon.com/sagemaker/ai/pricing/",
)
