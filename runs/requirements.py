"""What a replica's image must have, pinned as this release was tested.

``requirements/replica.txt`` holds the pins. A job is given torch, the library's own dependencies
and the client of its rendezvous' kind of bucket; the bootstrap installs what the image lacks.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings

from runs.models import Run

LIBRARY = ("torch", "fsspec", "numpy", "safetensors", "xxhash")
CLIENTS = {
    "s3": ("obstore", "s3fs"),
    "gs": ("obstore", "gcsfs"),
    "gcs": ("obstore", "gcsfs"),
    "az": ("obstore", "adlfs"),
    "abfs": ("obstore", "adlfs"),
    "hf": ("huggingface_hub",),
}
"""By URI scheme."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;]+)")


def replica_requirements(run: Run, *, remote: bool) -> tuple[str, ...]:
    """pip requirements: the library's own for ``remote`` jobs, then the workload's."""
    own = tuple(str(item) for item in run.workload.get("requirements", ()))
    if not remote:
        return own
    pins = _pins(Path(settings.BASE_DIR) / "requirements" / "replica.txt")
    clients = CLIENTS.get(urlsplit(run.rendezvous).scheme, ())
    return tuple(pins[_normal(name)] for name in (*LIBRARY, *clients)) + own


@lru_cache(maxsize=1)
def _pins(path: Path) -> dict[str, str]:
    found = (_PIN.match(line) for line in path.read_text().splitlines())
    return {_normal(m[1]): m[0] for m in found if m}


def _normal(name: str) -> str:
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
