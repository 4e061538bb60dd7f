"""Assignment of this machine's GPUs to local replicas, one GPU each.

Each GPU has a lock file, which the job's shim holds together with the job's lock. The GPU is free
again when the shim ends for any reason. Two control planes coordinate only if they share the
folder; other processes on the GPUs are not detected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from executors.base import AccountError, NoCapacity

_LIST = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")


def gpus_of(options: Mapping[str, Any]) -> list[str]:
    """GPUs that replicas can use, as ``CUDA_VISIBLE_DEVICES`` names them.

    From the option ``gpus``, else this process's CUDA_VISIBLE_DEVICES, else ``nvidia-smi``.
    """
    given = options.get("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if given is not None:
        parts: Sequence[object] = given.split(",") if isinstance(given, str) else given
        return [name for part in parts if (name := str(part).strip())]
    try:
        listed = subprocess.run(_LIST, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


@contextlib.contextmanager
def free_gpu(folder: Path, gpus: Sequence[str]) -> Iterator[tuple[str, BinaryIO]]:
    """A free GPU of ``gpus``, and its lock file, which is locked.

    Raises:
        AccountError: the machine has no GPU.
        NoCapacity: all GPUs are in use.
    """
    if not gpus:
        raise AccountError(
            "hardware 'gpu': this machine has no GPU that nvidia-smi lists; name them in the "
            "option gpus"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for gpu in gpus:
        with (folder / f"{gpu.replace('/', '-')}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield gpu, lock
            return
    raise NoCapacity(f"hardware 'gpu': all of this machine's GPUs ({', '.join(gpus)}) are taken")
