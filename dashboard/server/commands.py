"""Command lines of the services.

The supervisor runs them; ``docker-compose.yml`` repeats them, and a test compares the two.
"""

from __future__ import annotations

WORKER_PROCESSES = 3
CONTROL_PROCESSES = 2
INGEST_PROCESSES = 3
"""More than :data:`runs.backends.shared_breakers.SLOTS`, so that one slow store cannot occupy all
of them."""
INGEST_KB = 600_000
"""Resident memory in KB above which an ingest process is replaced."""
INGEST_MB = 2000
"""Memory in MB at which a record fails with MemoryError in its ingest process."""


def web(*, host: str, port: int) -> list[str]:
    """The ASGI server. Live streams do not end by themselves, so a stop waits only 5 s for them."""
    return [
        *("python", "-m", "uvicorn", "dashboard.asgi:application"),
        *("--host", host, "--port", str(port)),
        # Only dashboard/security/proxies.py trusts proxies.
        *("--timeout-graceful-shutdown", "5", "--lifespan", "off", "--no-proxy-headers"),
        *("--no-access-log", "--log-level", "warning"),
    ]


def worker() -> list[str]:
    """The worker for launches, deletions, exports, webhooks and the reaper."""
    return _worker("celery", WORKER_PROCESSES)


def control() -> list[str]:
    """The worker that controls runs. It does nothing else, so it always has capacity."""
    return _worker("control", CONTROL_PROCESSES)


def ingest() -> list[str]:
    """The worker that reads and writes buckets. Their content can hang it, exhaust its memory, or
    get it killed."""
    return [
        *_worker("ingest", INGEST_PROCESSES),
        *("--max-memory-per-child", str(INGEST_KB)),
    ]


def _worker(queue: str, processes: int) -> list[str]:
    """A worker of one queue. Workers do not coordinate, so gossip and mingle are off."""
    return [
        *("python", "-m", "celery", "-A", "dashboard", "worker"),
        *("--queues", queue, "--hostname", f"{queue}@%h"),
        *("--pool", "prefork", "--concurrency", str(processes)),
        *("--without-gossip", "--without-mingle", "--loglevel", "INFO"),
    ]


def beat() -> list[str]:
    """Celery beat. Its schedule is in the code, so it keeps no file."""
    return [
        *("python", "-m", "celery", "-A", "dashboard", "beat"),
        *("--scheduler", "dashboard.server.scheduler:MonotonicScheduler", "--loglevel", "WARNING"),
    ]
