"""Hardware of the emulated Hub, and validation of requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DEFAULT_TIMEOUT_S = 1800

_LABEL = re.compile(r"[A-Za-z0-9_-]{0,100}")

# name, label of the Hub, CPUs, GiB, GPU, USD per minute
_HARDWARE: tuple[tuple[str, str, int, int, tuple[str, int, int] | None, float], ...] = (
    ("cpu-basic", "CPU Basic", 2, 16, None, 0.000167),
    ("cpu-upgrade", "CPU Upgrade", 8, 32, None, 0.0005),
    ("t4-small", "Nvidia T4 - small", 4, 15, ("T4", 1, 16), 0.0067),
    ("a10g-small", "Nvidia A10G - small", 4, 15, ("A10G", 1, 24), 0.0167),
    ("a100x4", "4x Nvidia A100", 48, 568, ("A100", 4, 320), 0.1667),
    ("h200", "Nvidia H200", 23, 256, ("H200", 1, 141), 0.0833),
)


class Refused(Exception):
    """An error response: an HTTP status and the Hub's message."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def hardware() -> list[dict[str, Any]]:
    """``GET /api/jobs/hardware``."""
    return [
        {
            "name": name,
            "prettyName": label,
            "cpu": f"{cpus} vCPU",
            "ram": f"{memory} GB",
            "ephemeralStorage": "50 GB",
            "accelerator": gpu
            and {
                "type": "gpu",
                "model": gpu[0],
                "quantity": str(gpu[1]),
                "vram": f"{gpu[2]} GB",
                "manufacturer": "Nvidia",
            },
            "unitCostMicroUSD": round(price * 1e6),
            "unitCostUSD": price,
            "unitLabel": "minute",
        }
        for name, label, cpus, memory, gpu, price in _HARDWARE
    ]


def about_machine(flavour: str) -> dict[str, str]:
    """Environment variables that the Hub sets in a job."""
    row = next(row for row in _HARDWARE if row[0] == flavour)
    return {
        "ACCELERATOR": row[0] if row[4] else "none",
        "CPU_CORES": str(row[2]),
        "MEMORY": f"{row[3]}Gi",
    }


def check(spec: Mapping[str, Any]) -> None:
    """Validate a request against the Hub's schema."""

    def need(good: bool, where: str, expected: str) -> None:
        if not good:
            raise Refused(400, f"expected {expected} → at {where}")

    def texts(value: object) -> bool:
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())

    command = spec.get("command")
    need(
        isinstance(command, list) and bool(command) and all(isinstance(c, str) for c in command),
        "command",
        "an array of strings",
    )
    need(texts(spec.get("environment")), "environment", "a record of strings")
    need(texts(spec.get("secrets", {})), "secrets", "a record of strings")
    flavours = [row[0] for row in _HARDWARE]
    need(spec.get("flavor") in flavours, "flavor", f"one of {'|'.join(flavours)}")
    timeout = spec.get("timeoutSeconds", DEFAULT_TIMEOUT_S)
    need(isinstance(timeout, int) and timeout > 0, "timeoutSeconds", "a positive int")
    need(("dockerImage" in spec) != ("spaceId" in spec), "dockerImage", "an image or a Space")
    labels = spec.get("labels", {})
    need(texts(labels), "labels", "a record of strings")
    for label in (*labels, *labels.values()):
        need(
            _LABEL.fullmatch(label) is not None,
            "labels",
            "at most 100 alphanumeric characters, dashes and underscores",
        )
    for volume in spec.get("volumes", []):
        need(
            volume.get("type") in ("bucket", "model", "dataset", "space")
            and str(volume.get("mountPath", "")).startswith("/")
            and "/" in volume.get("source", ""),
            "volumes",
            "a type, a source and a mountPath",
        )
