"""Which of a backend's options a pool can set: those that stay inside its own job, and others only
as the credential's owner allows.

Options such as a service account, a role, volumes or a pod's security context act with the rights
of the credential in the cluster or account. A backend declares the options that do not
(:func:`executors.registry.pool_options`); every other option is restricted, and so is every option
that the server or the credential sets itself, because a pool's value would replace it.

An administrator allows options by patterns, in ``allowed_pool_options`` of the credential or, for
pools without a credential, of the backend in ``ARCHIPELAGO_BACKENDS``: ``{path: [value, ...]}``,
both with the wildcards of :mod:`fnmatch`. The path of a nested value is
``pod.securityContext.runAsUser``; items of a list have the path of the list. A value is text, or
JSON where it is no text.

The check runs when a pool is submitted, tested, scaled and launched, so that tightened patterns
hold for runs that exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from django.conf import settings

from executors.registry import pool_options
from runs.models import Credential, ReplicaPool

Patterns = Mapping[str, list[str]]

ALLOWED = "allowed_pool_options"
"""Name of the setting in ``ARCHIPELAGO_BACKENDS``; the executor is not given it."""
IMAGE = "image"
MAX_PATTERNS = 200
MAX_DEPTH = 20


def options_of_backend(backend: str, credential: Credential | None) -> dict[str, Any]:
    """Options that the server and the credential set for the executor."""
    found = {
        **settings.BACKEND_OPTIONS.get(backend, {}),
        **(credential.options if credential else {}),
    }
    found.pop(ALLOWED, None)
    return found


def patterns_of(backend: str, credential: Credential | None) -> Patterns:
    """The credential's patterns; without a credential those of the server for the backend."""
    if credential is not None:
        return read_patterns(credential.allowed_pool_options)
    return read_patterns(settings.BACKEND_OPTIONS.get(backend, {}).get(ALLOWED, {}))


def read_patterns(given: Any) -> dict[str, list[str]]:
    """Patterns as they are stored. Raises ``ValueError``."""
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise ValueError('expected a JSON object such as {"service_account": ["team-*"]}')
    found = {}
    for path, values in given.items():
        values = [values] if isinstance(values, str) else values
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{path}: expected a list of values, found {values!r}")
        found[str(path)] = values
    return found


def refused_options(backend: str, credential: Credential | None, options: Mapping[str, Any]) -> str:
    """Why a pool cannot have these options; '' if it can."""
    free = pool_options(backend) - set(options_of_backend(backend, credential))
    restricted = {name: value for name, value in options.items() if name not in free}
    if not restricted:
        return ""
    patterns = patterns_of(backend, credential)
    for path, text in _leaves(restricted):
        if not _is_allowed(path, text, patterns):
            return _refusal(path, text, backend, credential)
    return ""


def refused_image(backend: str, credential: Credential | None, image: str) -> str:
    """Why a pool cannot have the image: the patterns name images, and none of them matches."""
    patterns = patterns_of(backend, credential)
    if not image or IMAGE not in patterns or _is_allowed(IMAGE, image, patterns):
        return ""
    return _refusal(IMAGE, image, backend, credential)


def refused_by_credential(pool: ReplicaPool) -> str:
    """Why a stored pool cannot be launched with its credential as it is now; '' if it can."""
    credential = pool.credential
    return refused_options(pool.backend, credential, pool.options) or refused_image(
        pool.backend, credential, pool.image
    )


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path, text) of every value. An empty object or list is a value: it replaces another."""
    if depth > MAX_DEPTH:
        yield path, "..."
    elif isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name), depth + 1)
    elif isinstance(value, list | tuple) and value:
        for item in value:
            yield from _leaves(item, path, depth + 1)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)


def _is_allowed(path: str, text: str, patterns: Patterns) -> bool:
    return any(
        fnmatchcase(path, pattern) and any(fnmatchcase(text, value) for value in values)
        for pattern, values in patterns.items()
    )


def _refusal(path: str, text: str, backend: str, credential: Credential | None) -> str:
    shown = text if len(text) <= 60 else f"{text[:59]}…"
    if credential is None:
        where = f"in {ALLOWED} of [{backend}] in the file ARCHIPELAGO_BACKENDS"
    else:
        where = f"in the credential {credential.name}, under Options that pools can set"
    return (
        f"expected no {path} that the administrator has not allowed, found {shown!r}: an "
        f"administrator can allow it {where}"
    )
