"""How the services are started, in one place.

The supervisor runs these; ``docker-compose.yml`` has the same words, and a test compares them.
"""

from __future__ import annotations

WORKER_PROCESSES = 3
CONTROL_PROCESSES = 2
INGEST_PROCESSES = 3
"""More than :data:`runs.backends.shared_breakers.SLOTS`, so that one slow store never has all of
them."""
INGEST_KB = 600_000
"""Resident memory after which an ingest process is replaced."""
INGEST_MB = 2000
"""Memory at which a record fails with MemoryError in its ingest process."""


def web(*, host: str, port: int) -> list[str]:
    """The ASGI server. Live streams never end by themselves, so a stop waits for them only 5 s."""
    return [
        *("python", "-m", "uvicorn", "dashboard.asgi:application"),
        *("--host", host, "--port", str(port)),
        # Proxies are trusted by dashboard/security/proxies.py alone.
        *("--timeout-graceful-shutdown", "5", "--lifespan", "off", "--no-proxy-headers"),
        *("--no-access-log", "--log-level", "warning"),
    ]


def worker() -> list[str]:
    """Launches, deletions, exports, webhooks, the reaper: work that control does not wait for."""
    return _worker("celery", WORKER_PROCESSES)


def control() -> list[str]:
    """The worker that controls runs. It does nothing else, so it is never busy for long."""
    return _worker("control", CONTROL_PROCESSES)


def ingest() -> list[str]:
    """The worker that reads and writes buckets. What it reads can hang it, fill its memory or have
    it killed."""
    return [
        *_worker("ingest", INGEST_PROCESSES),
        *("--max-memory-per-child", str(INGEST_KB)),
    ]


def _worker(queue: str, processes: int) -> list[str]:
    """Workers of one broker need not know each other: no gossip, no mingle."""
    return [
        *("python", "-m", "celery", "-A", "dashboard", "worker"),
        *("--queues", queue, "--hostname", f"{queue}@%h"),
        *("--pool", "prefork", "--concurrency", str(processes)),
        *("--without-gossip", "--without-mingle", "--loglevel", "INFO"),
    ]


def beat() -> list[str]:
    """The ticker. Its schedule is in the code and in seconds, so nothing of it is kept on disk."""
    return [
        *("python", "-m", "celery", "-A", "dashboard", "beat"),
        *("--scheduler", "dashboard.server.scheduler:MonotonicScheduler", "--loglevel", "WARNING"),
    ]
