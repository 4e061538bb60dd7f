"""Pinned packages that a replica needs in its image.

``requirements/replica.txt`` has the tested versions. A job needs torch, the dependencies of the
library and the client of its kind of bucket. The bootstrap installs missing packages.
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
"""Not in the lock file, because each machine needs its own build. An installed torch is kept."""

LIBRARY = ("fsspec", "numpy", "safetensors", "xxhash")
CLIENTS = {
    "s3": ("obstore", "s3fs"),
    "gs": ("obstore", "gcsfs"),
    "gcs": ("obstore", "gcsfs"),
    "az": ("obstore", "adlfs"),
    "abfs": ("obstore", "adlfs"),
    "hf": ("huggingface_hub",),
}
"""Client packages by URI scheme."""

KINDS = {"huggingface": ("transformers==5.23.0", "tokenizers==0.23.3", "datasets==5.2.0")}
"""Further packages by kind of workload. Not in the lock file, because most replicas do not need
them; the versions are those of ``requirements/dev.txt``."""

LM_EVAL = "lm-eval==0.4.13"
"""Needed by evaluations with benchmark tasks; the version of ``requirements/dev.txt``."""

_PIN = re.compile(r"([A-Za-z0-9._-]+)==[^;]+(;.+)?")


def replica_requirements(run: Run, *, remote: bool) -> tuple[str, ...]:
    """pip requirements of replicas: the library's (for ``remote`` jobs) and the workload's."""
    own = tuple(str(item) for item in run.workload.get("requirements", ()))
    if not remote:
        return own
    pins = _pins(Path(settings.BASE_DIR) / "requirements" / "replica.txt")
    clients = CLIENTS.get(urlsplit(run.rendezvous).scheme, ())
    lines = [line for name in (*LIBRARY, *clients) for line in pins[_normal(name)]]
    return (TORCH, *lines, *KINDS.get(run.workload.get("kind", ""), ()), *own)


def evaluation_requirements(run: Run, *, remote: bool, tasks: bool) -> tuple[str, ...]:
    """pip requirements of an evaluation of the run."""
    return (*replica_requirements(run, remote=remote), *((LM_EVAL,) if tasks else ()))


@lru_cache(maxsize=1)
def _pins(path: Path) -> dict[str, list[str]]:
    """Pins by name; several if the version depends on the job's Python (environment markers)."""
    pins: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        match = _PIN.fullmatch(line.strip())
        if match:
            pins[_normal(match[1])].append(match[0])
    return dict(pins)


def _normal(name: str) -> str:
    """Normalize a package name as PEP 503 specifies."""
    return re.sub(r"[-_.]+", "-", name).lower()
