"""Django settings. Deployments configure them with environment variables, listed in
``docs/operations.md``; without any, the server runs on one machine with its state in ``var/``."""

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
from dashboard.security.private_files import create_once

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = Path(os.environ.get("ARCHIPELAGO_VAR", BASE_DIR / "var")).absolute()
"""The only folder with state: database, rendezvous, job logs, broker, keys."""


def _flag(name: str, default: bool) -> bool:
    return os.environ.get(name, str(default)).lower() in ("1", "true", "yes", "on")


def _list(name: str, default: str) -> list[str]:
    return [item for item in os.environ.get(name, default).split(",") if item]


def _persistent(name: str, variable: str, make: Callable[[], str]) -> str:
    """The environment variable, or a value generated once and stored in the state folder, readable
    only by its owner."""
    return os.environ.get(variable) or create_once(VAR_DIR / name, make)


def _file(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path).absolute() if path else None


def _toml(variable: str) -> dict[str, Any]:
    path = _file(variable)
    return tomllib.loads(path.read_text()) if path else {}


def _fernet_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key for key in re.split(r"[,\s]+", text) if key)
    for index, key in enumerate(keys, 1):
        try:
            size = f"{len(base64.urlsafe_b64decode(key))} bytes"
        except ValueError:
            size = "invalid base64"
        if size != "32 bytes":
            raise ImproperlyConfigured(
                f"ARCHIPELAGO_CREDENTIALS_KEY: expected comma-separated keys of 32 bytes in "
                f"URL-safe base64, found {size} in key {index} of {len(keys)}"
            )
    return keys


SECRET_KEY = _persistent("secret_key", "ARCHIPELAGO_SECRET_KEY", lambda: secrets.token_urlsafe(48))
CREDENTIALS_KEYS = _fernet_keys(
    _persistent(
        "credentials_key",
        "ARCHIPELAGO_CREDENTIALS_KEY",
        lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    )
)
"""Encryption keys of the credentials in the database: the first encrypts, all decrypt."""
DEBUG = _flag("ARCHIPELAGO_DEBUG", False)
DEFAULT_EXCEPTION_REPORTER = "dashboard.errors.SecretReporter"
DEFAULT_EXCEPTION_REPORTER_FILTER = "dashboard.errors.SecretFilter"
ALLOWED_HOSTS = _list("ARCHIPELAGO_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
TRUSTED_PROXIES = _list("ARCHIPELAGO_TRUSTED_PROXIES", os.environ.get("FORWARDED_ALLOW_IPS", ""))
"""Addresses and networks whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are trusted."""
CSRF_TRUSTED_ORIGINS = _list("ARCHIPELAGO_TRUSTED_ORIGINS", "")

INSTALLED_APPS = [
    "django.contrib.admin.apps.SimpleAdminConfig",  # dashboard/urls.py imports its pages
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
    "dashboard.access.with_fresh_prices",
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
                "dashboard.theme.context",
            ],
        },
    },
]

# SQLite with WAL, immediate transactions and a busy timeout: eight concurrent writers never get
# "database is locked"; with the defaults they get hundreds. Pages are read from a memory map: rows
# with arrays, of charts, take half as long.
_SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
    " PRAGMA mmap_size=268435456;",
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
# Served directly from static/ and the apps, without collectstatic.
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
# The operator decides whether other hosts of the domain use TLS and HSTS preloading.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")

CELERY_BROKER_URL = REDIS_URL
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# A new process reads the database before it is ready. On a busy machine that can take longer than
# Celery's 4 s, after which it kills the process.
CELERY_WORKER_PROC_ALIVE_TIMEOUT = 30
CELERY_TASK_TIME_LIMIT = 110
CELERY_TASK_SOFT_TIME_LIMIT = 90
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # Redeliver a task after this time if its worker died. It must exceed the longest task.
    "visibility_timeout": 120,
    "unacked_restore_interval": 2,
}

# Backends.
DEPLOYMENT = _persistent("deployment", "ARCHIPELAGO_DEPLOYMENT", lambda: f"a{secrets.token_hex(4)}")
"""Label of our jobs on every backend. The reaper ends jobs with it that belong to no active run."""
BACKEND_OPTIONS = _toml("ARCHIPELAGO_BACKENDS")
"""Executor options by backend; options of a credential override them."""
HARDWARE_FILE = _file("ARCHIPELAGO_HARDWARE")
# How old a process's copy of the prices in the database gets, in seconds; 0: it is not read again.
PRICE_REFRESH_S = float(os.environ.get("ARCHIPELAGO_PRICE_REFRESH_S", "10"))
OPERATORS_LOCAL = os.environ.get("ARCHIPELAGO_OPERATORS_LOCAL", "none")
"""What all operators can run on this machine: ``none``, ``backend``, or ``code`` (custom code
too)."""
LOCAL_USER = os.environ.get("ARCHIPELAGO_LOCAL_USER", "")
"""The account of local replicas. It requires that the server runs as root."""
AUDIT_LOG = os.environ.get("ARCHIPELAGO_AUDIT_LOG", "")
"""File for the audit log as JSON lines, or ``-`` for standard output."""
LOOPBACK_BACKENDS = frozenset(_list("ARCHIPELAGO_LOOPBACK_BACKENDS", ""))
"""Backends whose jobs run on this machine, and so reach its folders and loopback addresses."""
REAPER_POLICY = os.environ.get("ARCHIPELAGO_REAPER", "cancel")
"""What happens to orphaned jobs: ``cancel``, or only ``report``."""

PENDING_TIMEOUT_S = float(os.environ.get("ARCHIPELAGO_PENDING_TIMEOUT", "3600"))
"""How long a job can wait for a machine, a quota or its start before it is launched again; 0 for no
limit. Causes that require an operator have shorter limits."""

ALLOWED_ADDRESSES = _list("ARCHIPELAGO_ALLOWED_ADDRESSES", "")
"""Hosts, addresses and networks that webhooks and data URIs can reach although they are not
public."""
DATA_ROOTS = [
    Path(root).absolute() for root in _list("ARCHIPELAGO_DATA_ROOTS", str(VAR_DIR / "data"))
]
"""Folders on this machine that can contain the data of runs."""

DEFAULT_RENDEZVOUS = os.environ.get("ARCHIPELAGO_RENDEZVOUS", (VAR_DIR / "rendezvous").as_uri())
"""Prefix for the folders of runs without their own rendezvous."""
RENDEZVOUS_ROOTS = _list("ARCHIPELAGO_RENDEZVOUS_ROOTS", str(VAR_DIR / "rendezvous"))
"""Folders that can contain the prefix of a run, in addition to the default."""

LOG_FORMAT = os.environ.get("ARCHIPELAGO_LOG_FORMAT", "text")
"""``text``, or ``json``: one document per line, with run, replica and round."""
LOGGING = log_config(
    format=LOG_FORMAT, level=os.environ.get("ARCHIPELAGO_LOG_LEVEL", "INFO").upper()
)
