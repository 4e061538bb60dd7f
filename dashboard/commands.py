"""How the three services are started, said once.

The supervisor runs these; ``docker-compose.yml`` has the same words, and a test compares them.
"""

from __future__ import annotations

WORKER_PROCESSES = 4


def web(*, host: str, port: int) -> list[str]:
    """The ASGI server. Live streams never end by themselves, so a stop waits for them only 5 s."""
    return [
        *("python", "-m", "uvicorn", "dashboard.asgi:application"),
        *("--host", host, "--port", str(port)),
        # Proxies are trusted by dashboard/proxies.py alone.
        *("--timeout-graceful-shutdown", "5", "--lifespan", "off", "--no-proxy-headers"),
        *("--no-access-log", "--log-level", "warning"),
    ]


def worker() -> list[str]:
    """The Celery worker. Workers of one broker need not know each other: no gossip, no mingle."""
    return [
        *("python", "-m", "celery", "-A", "dashboard", "worker"),
        *("--pool", "prefork", "--concurrency", str(WORKER_PROCESSES)),
        *("--without-gossip", "--without-mingle", "--loglevel", "INFO"),
    ]


def beat() -> list[str]:
    """The ticker. Its schedule is in the code and in seconds, so nothing of it is kept on disk."""
    return [
        *("python", "-m", "celery", "-A", "dashboard", "beat"),
        *("--scheduler", "celery.beat.Scheduler", "--loglevel", "WARNING"),
    ]
