"""What a replica's image must have, pinned as this release was tested.

``requirements/replica.txt`` holds the pins. A job is given torch, the library's own dependencies
and the client of its rendezvous' kind of bucket; the bootstrap installs what the image lacks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings

from runs.models import Run

TORCH = "torch==2.13.0"
"""Not in the lock file: every machine takes its own build. A torch the image has is kept."""

LIBRARY = ("fsspec", "numpy", "safetensors", "xxhash")
CLIENTS = {
    "s3": ("obstore", "s3fs"),
    "gs": ("obstore", "gcsfs"),
    "gcs": ("obstore", "gcsfs"),
    "az": ("obstore", "adlfs"),
    "abfs": ("obstore", "adlfs"),
    "hf": ("huggingface_hub",),
}
"""By URI scheme."""

KINDS = {"huggingface": ("transformers==5.23.0", "tokenizers==0.23.3", "datasets==5.2.0")}
"""What a workload of that kind imports beside the library. Not in the lock file either, as most
replicas need none of it; pinned as ``requirements/dev.txt`` has it."""

_PIN = re.compile(r"([A-Za-z0-9._-]+)==[^;]+(;.+)?")


def replica_requirements(run: Run, *, remote: bool) -> tuple[str, ...]:
    """pip requirements: the library's own for ``remote`` jobs, then the workload's."""
    own = tuple(str(item) for item in run.workload.get("requirements", ()))
    if not remote:
        return own
    pins = _pins(Path(settings.BASE_DIR) / "requirements" / "replica.txt")
    clients = CLIENTS.get(urlsplit(run.rendezvous).scheme, ())
    lines = [line for name in (*LIBRARY, *clients) for line in pins[_normal(name)]]
    return (TORCH, *lines, *KINDS.get(run.workload.get("kind", ""), ()), *own)


@lru_cache(maxsize=1)
def _pins(path: Path) -> dict[str, list[str]]:
    """By name; several where the version depends on the job's Python, which a marker says."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        match = _PIN.fullmatch(line.strip())
        if match:
            found[_normal(match[1])].append(match[0])
    return dict(found)


def _normal(name: str) -> str:
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
