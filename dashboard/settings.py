"""Django settings. Everything a deployment changes is an environment variable, listed in
``docs/operations.md``; without any, the server runs on one machine out of ``var/``."""

from __future__ import annotations

import base64
import os
import re
import secrets
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dj_database_url
from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from dashboard.logging import config as log_config

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = Path(os.environ.get("ARCHIPELAGO_VAR", BASE_DIR / "var")).absolute()
"""The one folder that holds state: database, rendezvous, job logs, broker, keys."""


def _flag(name: str, default: bool) -> bool:
    return os.environ.get(name, str(default)).lower() in ("1", "true", "yes", "on")


def _list(name: str, default: str) -> list[str]:
    return [item for item in os.environ.get(name, default).split(",") if item]


def _kept(name: str, variable: str, make: Callable[[], str]) -> str:
    """From the environment, else made once and kept in the state folder, readable by its owner."""
    given = os.environ.get(variable)
    if given:
        return given
    path = VAR_DIR / name
    if not path.exists():
        VAR_DIR.mkdir(parents=True, exist_ok=True)
        made = VAR_DIR / f".{name}.{secrets.token_hex(4)}"
        made.touch(mode=0o600)
        made.write_text(make())
        try:
            os.link(made, path)  # whoever is first wins; the others read the winner's
        except FileExistsError:
            pass
        finally:
            made.unlink()
    return path.read_text()


def _file(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path).absolute() if path else None


def _toml(variable: str) -> dict[str, Any]:
    path = _file(variable)
    return tomllib.loads(path.read_text()) if path else {}


def _fernet_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key for key in re.split(r"[,\s]+", text) if key)
    for place, key in enumerate(keys, 1):
        try:
            found = f"{len(base64.urlsafe_b64decode(key))} bytes"
        except ValueError:
            found = "no base64"
        if found != "32 bytes":
            raise ImproperlyConfigured(
                f"ARCHIPELAGO_CREDENTIALS_KEY: expected keys of 32 bytes in URL-safe base64, with "
                f"commas, found {found} in key {place} of {len(keys)}"
            )
    return keys


SECRET_KEY = _kept("secret_key", "ARCHIPELAGO_SECRET_KEY", lambda: secrets.token_urlsafe(48))
CREDENTIALS_KEYS = _fernet_keys(
    _kept(
        "credentials_key",
        "ARCHIPELAGO_CREDENTIALS_KEY",
        lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    )
)
"""Seal credentials in the database: the first seals, all open."""
DEBUG = _flag("ARCHIPELAGO_DEBUG", False)
DEFAULT_EXCEPTION_REPORTER = "dashboard.errors.SecretReporter"
DEFAULT_EXCEPTION_REPORTER_FILTER = "dashboard.errors.SecretFilter"
ALLOWED_HOSTS = _list("ARCHIPELAGO_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
TRUSTED_PROXIES = _list("ARCHIPELAGO_TRUSTED_PROXIES", os.environ.get("FORWARDED_ALLOW_IPS", ""))
"""Addresses and networks whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are used."""
CSRF_TRUSTED_ORIGINS = _list("ARCHIPELAGO_TRUSTED_ORIGINS", "")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "csp",
    "runs",
    "dashboard",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "dashboard.security.audit_hooks.middleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "dashboard.urls"
ASGI_APPLICATION = "dashboard.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# SQLite: with WAL, immediate transactions and a busy timeout, eight writer processes never see
# "database is locked"; with the defaults they see hundreds.
_SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


def _database() -> dict[str, Any]:
    url = os.environ.get("DATABASE_URL")
    if not url:
        VAR_DIR.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{VAR_DIR / 'archipelago.sqlite3'}"
    config: dict[str, Any] = {**dj_database_url.parse(url)}
    if config["ENGINE"] == "django.db.backends.sqlite3":
        config["OPTIONS"] = _SQLITE_OPTIONS
    return config


DATABASES = {"default": _database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "runs"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True
FORMAT_MODULE_PATH = "dashboard.presentation.date_formats"

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
# Served straight from static/ and the apps, so that no collectstatic step is needed.
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG
if not DEBUG:
    STATICFILES_FINDERS = [
        "dashboard.assets.ShippedFinder",
        "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    ]

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "form-action": [SELF],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
    },
}
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY = True
_HTTPS = _flag("ARCHIPELAGO_HTTPS", False)
SESSION_COOKIE_SECURE = _HTTPS
CSRF_COOKIE_SECURE = _HTTPS
CSRF_FAILURE_VIEW = "dashboard.views.errors.csrf_failure"
SECURE_SSL_REDIRECT = _HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if _HTTPS else 0
# Whether all other hosts of the domain have TLS, and may be put into browsers, is not ours to say.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")

CELERY_BROKER_URL = REDIS_URL
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TASK_TIME_LIMIT = 110
CELERY_TASK_SOFT_TIME_LIMIT = 90
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # A task whose worker died is delivered again after this long; every task is shorter.
    "visibility_timeout": 120,
    "unacked_restore_interval": 2,
}

# Backends.
DEPLOYMENT = _kept("deployment", "ARCHIPELAGO_DEPLOYMENT", lambda: f"a{secrets.token_hex(4)}")
"""Marks our jobs on every backend: the reaper ends jobs that carry it and that nobody knows."""
BACKEND_OPTIONS = _toml("ARCHIPELAGO_BACKENDS")
"""Backend -> options of its executor, under those of a credential."""
HARDWARE_FILE = _file("ARCHIPELAGO_HARDWARE")
OPERATORS_LOCAL = os.environ.get("ARCHIPELAGO_OPERATORS_LOCAL", "none")
"""What all operators can run on this machine: ``none``, ``backend``, or ``code`` as well."""
LOCAL_USER = os.environ.get("ARCHIPELAGO_LOCAL_USER", "")
"""The account that local replicas run as; the server must be root."""
AUDIT_LOG = os.environ.get("ARCHIPELAGO_AUDIT_LOG", "")
"""A file, or ``-`` for standard output, that gets each entry of the audit log as a JSON line."""
LOOPBACK_BACKENDS = frozenset(_list("ARCHIPELAGO_LOOPBACK_BACKENDS", ""))
"""Backends whose jobs run on this machine, whatever their kind: they reach its folders and its
loopback addresses."""
REAPER_POLICY = os.environ.get("ARCHIPELAGO_REAPER", "cancel")
"""What becomes of jobs nobody knows: ``cancel``, or ``report`` only."""

PENDING_TIMEOUT_S = float(os.environ.get("ARCHIPELAGO_PENDING_TIMEOUT", "3600"))
"""How long a job may wait for a machine, a quota or its start before it is launched again; 0 for
ever. Causes that only an operator can remove have shorter limits of their own."""

ALLOWED_ADDRESSES = _list("ARCHIPELAGO_ALLOWED_ADDRESSES", "")
"""Hosts, addresses and networks that webhooks and data URIs reach although they are not public."""
DATA_ROOTS = [
    Path(root).absolute() for root in _list("ARCHIPELAGO_DATA_ROOTS", str(VAR_DIR / "data"))
]
"""Folders below which a run's data can be on this machine."""

DEFAULT_RENDEZVOUS = os.environ.get("ARCHIPELAGO_RENDEZVOUS", (VAR_DIR / "rendezvous").as_uri())
"""Prefix under which a run gets its own folder unless the form names another."""
RENDEZVOUS_ROOTS = _list("ARCHIPELAGO_RENDEZVOUS_ROOTS", str(VAR_DIR / "rendezvous"))
"""Folders below which a run's prefix may lie, besides a folder that is the default."""

LOG_FORMAT = os.environ.get("ARCHIPELAGO_LOG_FORMAT", "text")
"""``text`` for people, or ``json``: a document a line, with run, replica and round."""
LOGGING = log_config(
    format=LOG_FORMAT, level=os.environ.get("ARCHIPELAGO_LOG_LEVEL", "INFO").upper()
)
