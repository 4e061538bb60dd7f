"""Settings that cannot work, and what a server that others reach must have set.

``manage.py check`` asks the former, ``manage.py check --deploy`` both; ``docs/operations.md`` has
them by their ids. Web server, workers and ticker ask at their start (:func:`at_start`): what cannot
work ends them with its reason, and behind TLS, which is where others reach them, what is missing
is said in the log. https://docs.djangoproject.com/en/5.2/topics/checks/ has the framework.

Left out: whether database, broker and bucket answer. They may be away for a while; ``/readyz``
says so.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register, run_checks
from redis.connection import parse_url

from dashboard.logging import FORMATS
from dashboard.security import private_files
from dashboard.security.proxies import parse_networks
from executors.local.user import unreachable, user_problem

logger = logging.getLogger(__name__)

TAG = "archipelago"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
GRANTS = ("none", "backend", "code")
REAPER_POLICIES = ("cancel", "report")


@register(TAG)
def what_cannot_work(app_configs: Any, **_: Any) -> list[CheckMessage]:
    return list(_impossible())


@register(TAG, Tags.security, deploy=True)
def what_others_need(app_configs: Any, **_: Any) -> list[CheckMessage]:
    return list(_missing())


def _impossible() -> Iterator[CheckMessage]:
    if settings.LOG_FORMAT not in FORMATS:
        yield _error("E001", f"ARCHIPELAGO_LOG_FORMAT: expected {_either(FORMATS)}, "
                     f"found {settings.LOG_FORMAT!r}")  # fmt: skip
    if settings.REAPER_POLICY not in REAPER_POLICIES:
        yield _error("E002", f"ARCHIPELAGO_REAPER: expected {_either(REAPER_POLICIES)}, "
                     f"found {settings.REAPER_POLICY!r}")  # fmt: skip
    if not 0 <= settings.PENDING_TIMEOUT_S < float("inf"):
        yield _error("E010", "ARCHIPELAGO_PENDING_TIMEOUT: expected seconds, 0 or more, "
                     f"found {settings.PENDING_TIMEOUT_S}")  # fmt: skip
    if reason := _unwritable():
        yield _error("E003", f"ARCHIPELAGO_VAR: the state folder {settings.VAR_DIR} cannot be "
                     f"written: {reason}")  # fmt: skip
    try:
        parse_url(settings.REDIS_URL)  # type: ignore[no-untyped-call]
    except ValueError as error:
        yield _error("E004", f"REDIS_URL: {error}")
    try:
        parse_networks(settings.TRUSTED_PROXIES)
    except ValueError as error:
        yield _error("E006", "ARCHIPELAGO_TRUSTED_PROXIES: expected addresses and networks with "
                     f"commas, such as 10.0.0.0/8: {error}")  # fmt: skip
    if settings.OPERATORS_LOCAL not in GRANTS:
        yield _error("E007", f"ARCHIPELAGO_OPERATORS_LOCAL: expected {_either(GRANTS)}, "
                     f"found {settings.OPERATORS_LOCAL!r}")  # fmt: skip
    if settings.LOCAL_USER and (
        reason := user_problem(settings.LOCAL_USER) or unreachable(Path(sys.executable))
    ):
        yield _error("E008", f"ARCHIPELAGO_LOCAL_USER: {reason}")
    if "://" not in settings.DEFAULT_RENDEZVOUS:
        yield _error("E005", "ARCHIPELAGO_RENDEZVOUS: expected a URI such as s3://bucket/prefix, "
                     f"found {settings.DEFAULT_RENDEZVOUS!r}")  # fmt: skip


def _missing() -> Iterator[CheckMessage]:
    named = [host for host in settings.ALLOWED_HOSTS if host not in LOOPBACK]
    if not named:
        yield _error("E101", "ARCHIPELAGO_ALLOWED_HOSTS: expected the names people reach the "
                     "server by, found none but this machine's own")  # fmt: skip
    if "*" in named:
        yield _error("E102", "ARCHIPELAGO_ALLOWED_HOSTS: expected names, found '*': a request may "
                     "claim any, and links are made of it")  # fmt: skip
    if any(network.prefixlen == 0 for network in parse_networks(settings.TRUSTED_PROXIES)):
        yield _error("E110", "ARCHIPELAGO_TRUSTED_PROXIES: expected the proxies' own addresses, "
                     "found every address: any client could choose its own")  # fmt: skip
    if not settings.SECURE_SSL_REDIRECT:
        yield _error("E103", "ARCHIPELAGO_HTTPS is off: passwords and sessions travel in the clear")
    for id, name in (
        ("W104", "ARCHIPELAGO_SECRET_KEY"),
        ("W105", "ARCHIPELAGO_CREDENTIALS_KEY"),
        ("W106", "ARCHIPELAGO_DEPLOYMENT"),
    ):
        if not os.environ.get(name):
            yield _warning(id, f"{name} is not set: each state folder makes its own, and all "
                           "processes need the same")  # fmt: skip
    if settings.DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
        yield _warning("W107", "DATABASE_URL is not set: SQLite serves processes of one machine")
    if not os.environ.get("REDIS_URL"):
        yield _warning("W108", "REDIS_URL is not set: the embedded broker serves one machine")
    if private_files.exposed(settings.VAR_DIR):
        yield _warning("W111", f"other accounts can read {settings.VAR_DIR}: run serve, or chmod "
                       "-R go-rwx on it")  # fmt: skip
    if settings.OPERATORS_LOCAL != "none" and not settings.LOCAL_USER:
        yield _warning("W112", "ARCHIPELAGO_LOCAL_USER is not set: local replicas of operators run "
                       "as the server's own account and can read its keys")  # fmt: skip
    if settings.DEFAULT_RENDEZVOUS.startswith("file:"):
        yield _warning("W109", "ARCHIPELAGO_RENDEZVOUS is a folder: replicas elsewhere cannot "
                       "reach it")  # fmt: skip


def _error(id: str, message: str) -> Error:
    return Error(message, id=f"{TAG}.{id}")


def _warning(id: str, message: str) -> Warning:
    return Warning(message, id=f"{TAG}.{id}")


def _either(words: Sequence[str]) -> str:
    return " or ".join(words)


def _unwritable() -> str:
    """Why the state folder cannot be written; '' if it can."""
    probe = settings.VAR_DIR / f".check-{os.getpid()}"
    try:
        settings.VAR_DIR.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def at_start() -> None:
    """Ends the process if its settings cannot work. Call it when Django is set up."""
    fatal = [message for message in run_checks(tags=[TAG]) if message.is_serious()]
    if fatal:
        raise SystemExit("\n".join(f"archipelago: {one.msg} ({one.id})" for one in fatal))
    if settings.SECURE_SSL_REDIRECT:
        for message in _missing():
            logger.warning("%s (%s)", message.msg, message.id)
