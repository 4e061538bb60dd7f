"""System checks: invalid settings, and settings that a public server must have.

``manage.py check`` runs the first kind, ``manage.py check --deploy`` both; ``docs/operations.md``
lists them by id. Web server, workers and beat run them at start (:func:`at_start`): invalid
settings end the process with the reason; behind TLS, missing settings are logged as warnings. See
https://docs.djangoproject.com/en/5.2/topics/checks/.

The checks do not test whether database, broker and bucket respond, because they can be down for a
while; ``/readyz`` reports that.
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
def check_validity(app_configs: Any, **_: Any) -> list[CheckMessage]:
    return list(_impossible())


@register(TAG, Tags.security, deploy=True)
def check_deployment(app_configs: Any, **_: Any) -> list[CheckMessage]:
    return list(_missing())


def _impossible() -> Iterator[CheckMessage]:
    if settings.LOG_FORMAT not in FORMATS:
        yield _error(
            "E001",
            f"ARCHIPELAGO_LOG_FORMAT: expected {_either(FORMATS)}, found {settings.LOG_FORMAT!r}",
        )
    if settings.REAPER_POLICY not in REAPER_POLICIES:
        yield _error(
            "E002",
            f"ARCHIPELAGO_REAPER: expected {_either(REAPER_POLICIES)}, "
            f"found {settings.REAPER_POLICY!r}",
        )
    if not 0 <= settings.PENDING_TIMEOUT_S < float("inf"):
        yield _error(
            "E010",
            "ARCHIPELAGO_PENDING_TIMEOUT: expected seconds, 0 or more, "
            f"found {settings.PENDING_TIMEOUT_S}",
        )
    if reason := _unwritable():
        yield _error(
            "E003",
            f"ARCHIPELAGO_VAR: the state folder {settings.VAR_DIR} cannot be written: {reason}",
        )
    try:
        parse_url(settings.REDIS_URL)  # type: ignore[no-untyped-call]
    except ValueError as error:
        yield _error("E004", f"REDIS_URL: {error}")
    try:
        parse_networks(settings.TRUSTED_PROXIES)
    except ValueError as error:
        yield _error(
            "E006",
            "ARCHIPELAGO_TRUSTED_PROXIES: expected comma-separated addresses and "
            f"networks such as 10.0.0.0/8: {error}",
        )
    if settings.OPERATORS_LOCAL not in GRANTS:
        yield _error(
            "E007",
            f"ARCHIPELAGO_OPERATORS_LOCAL: expected {_either(GRANTS)}, "
            f"found {settings.OPERATORS_LOCAL!r}",
        )
    if settings.LOCAL_USER and (
        reason := user_problem(settings.LOCAL_USER) or unreachable(Path(sys.executable))
    ):
        yield _error("E008", f"ARCHIPELAGO_LOCAL_USER: {reason}")
    if "://" not in settings.DEFAULT_RENDEZVOUS:
        yield _error(
            "E005",
            "ARCHIPELAGO_RENDEZVOUS: expected a URI such as s3://bucket/prefix, "
            f"found {settings.DEFAULT_RENDEZVOUS!r}",
        )


def _missing() -> Iterator[CheckMessage]:
    named = [host for host in settings.ALLOWED_HOSTS if host not in LOOPBACK]
    if not named:
        yield _error(
            "E101",
            "ARCHIPELAGO_ALLOWED_HOSTS: expected the public host names of the "
            "server, found only names of this machine",
        )
    if "*" in named:
        yield _error(
            "E102",
            "ARCHIPELAGO_ALLOWED_HOSTS: expected names, found '*': a request can "
            "claim any host, and links use it",
        )
    if any(network.prefixlen == 0 for network in parse_networks(settings.TRUSTED_PROXIES)):
        yield _error(
            "E110",
            "ARCHIPELAGO_TRUSTED_PROXIES: expected the addresses of the proxies, "
            "found all addresses: a client could forge its own",
        )
    if not settings.SECURE_SSL_REDIRECT:
        yield _error("E103", "ARCHIPELAGO_HTTPS is off: passwords and sessions are not encrypted")
    for id, name in (
        ("W104", "ARCHIPELAGO_SECRET_KEY"),
        ("W105", "ARCHIPELAGO_CREDENTIALS_KEY"),
        ("W106", "ARCHIPELAGO_DEPLOYMENT"),
    ):
        if not os.environ.get(name):
            yield _warning(
                id,
                f"{name} is not set: each state folder generates its own, but all "
                "processes need the same",
            )
    if settings.DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
        yield _warning("W107", "DATABASE_URL is not set: SQLite supports only one machine")
    if not os.environ.get("REDIS_URL"):
        yield _warning("W108", "REDIS_URL is not set: the embedded broker supports one machine")
    if private_files.exposed(settings.VAR_DIR):
        yield _warning(
            "W111",
            f"other accounts can read {settings.VAR_DIR}: run serve, or chmod -R go-rwx on it",
        )
    if settings.OPERATORS_LOCAL != "none" and not settings.LOCAL_USER:
        yield _warning(
            "W112",
            "ARCHIPELAGO_LOCAL_USER is not set: local replicas of operators run "
            "with the server's account and can read its keys",
        )
    if settings.DEFAULT_RENDEZVOUS.startswith("file:"):
        yield _warning(
            "W109", "ARCHIPELAGO_RENDEZVOUS is a folder that remote replicas cannot reach"
        )


def _error(id: str, message: str) -> Error:
    return Error(message, id=f"{TAG}.{id}")


def _warning(id: str, message: str) -> Warning:
    return Warning(message, id=f"{TAG}.{id}")


def _either(options: Sequence[str]) -> str:
    return " or ".join(options)


def _unwritable() -> str:
    """Why the state folder is not writable; '' if it is."""
    probe = settings.VAR_DIR / f".check-{os.getpid()}"
    try:
        settings.VAR_DIR.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def at_start() -> None:
    """End the process if settings are invalid. Call this once Django is set up."""
    fatal = [message for message in run_checks(tags=[TAG]) if message.is_serious()]
    if fatal:
        raise SystemExit(
            "\n".join(f"archipelago: {message.msg} ({message.id})" for message in fatal)
        )
    if settings.SECURE_SSL_REDIRECT:
        for message in _missing():
            logger.warning("%s (%s)", message.msg, message.id)
