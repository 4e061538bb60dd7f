"""Restrict the backend options that a pool can set.

Options such as a service account, a role, volumes or a pod's security context use the rights of the
credential in the cluster or account. A backend declares the options that affect only the job itself
(:func:`executors.registry.pool_options`). Every other option is restricted, and so is each option
that the server or the credential sets, because the value of a pool would replace it.

An administrator allows options with patterns ``{path: [value, ...]}``, both with the wildcards of
:mod:`fnmatch`. They are stored in ``allowed_pool_options`` of the credential or, for pools without
a credential, of the backend in ``ARCHIPELAGO_BACKENDS``. The path of a nested value is
``pod.securityContext.runAsUser``; items of a list have the path of the list. A value that is not
text is compared as JSON.

A pool is checked when it is submitted, tested, scaled and launched, so that stricter patterns apply
to existing runs.
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
"""Name of the setting in ``ARCHIPELAGO_BACKENDS``, which executors do not get."""
IMAGE = "image"
MAX_PATTERNS = 200
MAX_DEPTH = 20


def options_of_backend(backend: str, credential: Credential | None) -> dict[str, Any]:
    """Options that the server and the credential set for the executor."""
    options = {
        **settings.BACKEND_OPTIONS.get(backend, {}),
        **(credential.options if credential else {}),
    }
    options.pop(ALLOWED, None)
    return options


def patterns_of(backend: str, credential: Credential | None) -> Patterns:
    """Patterns of the credential or, without one, of the backend in the server's settings."""
    if credential is not None:
        return read_patterns(credential.allowed_pool_options)
    return read_patterns(settings.BACKEND_OPTIONS.get(backend, {}).get(ALLOWED, {}))


def read_patterns(stored: Any) -> dict[str, list[str]]:
    """Parse stored patterns. Raises ``ValueError`` if they are invalid."""
    if not isinstance(stored, dict) or len(stored) > MAX_PATTERNS:
        raise ValueError('expected a JSON object such as {"service_account": ["team-*"]}')
    patterns = {}
    for path, values in stored.items():
        values = [values] if isinstance(values, str) else values
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{path}: expected a list of values, found {values!r}")
        patterns[str(path)] = values
    return patterns


def refused_options(backend: str, credential: Credential | None, options: Mapping[str, Any]) -> str:
    """Why a pool cannot have these options; '' if allowed."""
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
    """Why a pool cannot have the image; '' if it matches a pattern or no pattern names images."""
    patterns = patterns_of(backend, credential)
    if not image or IMAGE not in patterns or _is_allowed(IMAGE, image, patterns):
        return ""
    return _refusal(IMAGE, image, backend, credential)


def refused_by_credential(pool: ReplicaPool) -> str:
    """Why a stored pool cannot be launched with the current patterns; '' if allowed."""
    credential = pool.credential
    return refused_options(pool.backend, credential, pool.options) or refused_image(
        pool.backend, credential, pool.image
    )


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path, text) of every value. An empty object or list counts as a value."""
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
