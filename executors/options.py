"""Declare a backend's options once: name, type, default, unit, bounds, help and who can set them.

Each backend has a frozen dataclass of options whose fields are made by :func:`option`. From it
follow the checks of :func:`read`, the fields of a credential's form, the options that a pool can
set, and the test that the backend's page documents every option.

The type annotation decides what a value must look like; :data:`Json` is an object of any content.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

Json = dict[str, Any]
T = TypeVar("T")


class Scope(enum.StrEnum):
    """The places where an option can be set."""

    EXECUTOR = "executor"
    """The server or a credential, for the whole executor; never a pool."""
    RESTRICTED = "restricted"
    """Also a pool, where the credential's patterns allow it: the option acts with the rights of
    the credential in the account or cluster."""
    POOL = "pool"
    """Also any pool: the option stays inside the pool's own jobs."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. ``kind`` is its type, without ``| None``."""

    name: str
    kind: Any
    default: Any
    label: str
    help: str = ""
    unit: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive: bool = False
    """The value must be above ``minimum``."""
    scope: Scope = Scope.RESTRICTED
    in_credential: bool = False
    """The form of a credential has a field for it; others are typed there as JSON."""
    comma: bool = False
    """A text is split at its commas into a list of names."""
    check: Callable[[str, Any], Any] | None = None
    """Called with the name and the checked value; returns the value or raises ValueError."""


def option(
    default: Any = "",
    *,
    label: str,
    scope: Scope = Scope.RESTRICTED,
    **declaration: Any,
) -> Any:
    """A field of an options dataclass; ``declaration`` holds fields of :class:`Option`."""
    metadata = {"option": {"label": label, "scope": scope, **declaration}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def poll_interval(default: float, **changes: Any) -> Any:
    """A field for the time between two polls."""
    declaration = {
        "label": "Poll interval",
        "exclusive": True,
        "help": "How often a caller that waits for jobs, or follows a log, polls",
    }
    return option(default, unit="s", minimum=0, scope=Scope.EXECUTOR, **{**declaration, **changes})


def request_timeout() -> Any:
    """A field for the timeout of a request to the backend."""
    return option(
        30.0, label="Request timeout", unit="s", minimum=0, exclusive=True, scope=Scope.EXECUTOR
    )


def options_of(options: type[Any]) -> Mapping[str, Option]:
    """The options that a dataclass declares, by name, in their order."""
    return _options_of(cast(Hashable, options))


@cache
def _options_of(key: Hashable) -> Mapping[str, Option]:
    options = cast(type[Any], key)
    kinds = typing.get_type_hints(options)
    return {
        field.name: Option(
            name=field.name,
            kind=_without_none(kinds[field.name]),
            default={} if field.default is dataclasses.MISSING else field.default,
            **field.metadata["option"],
        )
        for field in dataclasses.fields(options)
    }


def read(
    options: type[T], of_executor: Mapping[str, Any], of_spec: Mapping[str, Any] | None = None
) -> T:
    """The checked options of one job: those of its spec replace those of the executor.

    Raises:
        ValueError: an unknown name, a value of the wrong type or out of bounds, or an option in
            ``of_spec`` that only the executor can have.
    """
    known = options_of(options)
    fixed = [name for name in of_spec or () if name in known and is_fixed(known[name])]
    if fixed:
        raise ValueError(
            f"{', '.join(sorted(fixed))}: expected in the executor's options, not in a job's"
        )
    given = {**of_executor, **(of_spec or {})}
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"options: expected {', '.join(known)}, found {', '.join(unknown)}")
    return options(**{name: checked(known[name], value) for name, value in given.items()})


def is_fixed(declared: Option) -> bool:
    return declared.scope is Scope.EXECUTOR


def checked(declared: Option, value: Any) -> Any:
    """``value`` as the option's type. Raises ValueError."""
    name, kind = declared.name, declared.kind
    if value is None and declared.default is None:
        return None
    if kind in (int, float):
        value = _number(declared, value)
    elif kind is bool:
        if not isinstance(value, bool):
            raise refused(name, "true or false", value)
    elif kind is str:
        if not isinstance(value, str):
            raise refused(name, "a text", value)
    elif kind == Json:
        if not isinstance(value, Mapping):
            raise refused(name, "an object", value)
        value = dict(value)
    elif typing.get_origin(kind) is tuple:
        value = _items(declared, value, typing.get_args(kind)[0])
    elif kind == Mapping[str, Json]:
        value = _object_of_objects(name, value)
    elif kind is not Any:
        value = map_of_text(name, value)
    return value if declared.check is None else declared.check(name, value)


def map_of_text(name: str, value: Any) -> dict[str, str]:
    """A mapping of names to texts; numbers become texts."""
    if not isinstance(value, Mapping) or not all(
        isinstance(each, str | int | float) and not isinstance(each, bool)
        for each in value.values()
    ):
        raise refused(name, "a mapping of names to texts or numbers", value)
    return {str(key): str(each) for key, each in value.items()}


def list_of_objects(name: str, value: Any) -> tuple[Json, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise refused(name, "a list of mappings", value)
    return tuple(dict(each) for each in value)


def _object_of_objects(name: str, value: Any) -> dict[str, Json]:
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise refused(name, "a mapping of names to objects", value)
    return {str(key): dict(each) for key, each in value.items()}


def refused(name: str, expected: str, found: object) -> ValueError:
    return ValueError(f"{name}: expected {expected}, found {found!r}")


def _number(declared: Option, value: Any) -> int | float:
    is_whole = declared.kind is int
    if is_whole and isinstance(value, str) and value.isdecimal():
        value = int(value)
    types_ = int if is_whole else int | float
    low, high = declared.minimum, declared.maximum
    is_number = isinstance(value, types_) and not isinstance(value, bool)
    is_too_low = is_number and (value <= low if declared.exclusive else value < low)
    if not is_number or is_too_low or value > high:
        whole = "whole " if is_whole else ""
        raise refused(declared.name, f"a {whole}number{bounds(declared)}", value)
    return int(value) if is_whole else float(value)


def bounds(declared: Option) -> str:
    """The bounds and the unit in words, with a leading space: `` of at least 0 s``."""
    unit = f" {declared.unit}" if declared.unit else ""
    low, high = declared.minimum, declared.maximum
    parts = []
    if low > -math.inf:
        parts.append(f"{'above' if declared.exclusive else 'of at least'} {low:g}{unit}")
    if high < math.inf:
        parts.append(f"{'and ' if parts else 'of '}at most {high:g}{unit}")
    return "".join(f" {part}" for part in parts) or (f" of {declared.unit}" if unit else "")


def _items(declared: Option, value: Any, kind: Any) -> tuple[Any, ...]:
    if kind == Json:
        return list_of_objects(declared.name, value)
    if declared.comma and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise refused(declared.name, "a list of texts", value)
    return tuple(value)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    return kind
