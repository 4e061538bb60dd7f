"""The GPUs of this machine, handed to local replicas one each.

A GPU is taken by a lock file of its own, held by the job's shim like the job's lock: it is free
again when the shim is gone, however it went. So two control planes share a machine's GPUs only if
they share the folder; processes that are not ours are not seen at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from executors.base import NeedsPerson, NoCapacity

_LIST = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")


def gpus_of(options: Mapping[str, Any]) -> list[str]:
    """The GPUs that replicas may have, as ``CUDA_VISIBLE_DEVICES`` names them: those of the option
    ``gpus``, else of our own CUDA_VISIBLE_DEVICES, else all that ``nvidia-smi`` lists."""
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
    """One of ``gpus`` that no other job has, and the file whose lock says so.

    Raises :class:`NeedsPerson` where there is none at all, :class:`NoCapacity` where all are
    taken.
    """
    if not gpus:
        raise NeedsPerson(
            "hardware 'gpu': this machine has no GPU that nvidia-smi lists; name some in the "
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
