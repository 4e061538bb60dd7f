"""Base class of the protocol's JSON records: strict parsing, size limits and a checksum.

Every record carries ``v``, the protocol version, and is checked field by field when read: a record
that does not match its class exactly raises :class:`BadRecord` and is never used (invariant I7).
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, Union

from diloco.protocol.group_document import PROTOCOL
from diloco.protocol.parsing import MAX_CONTAINERS, abridged, check_depth, parse_json
from diloco.store.base import NotAnObject, ObjectTooLarge, Store

INT_LIMIT = 2**63
MEBIBYTE = 1 << 20


class BadRecord(ValueError):
    """A record is not JSON, has another version, or has missing, unknown or invalid fields."""


class Extensible:
    """Marks a record whose unknown fields are ignored, because later versions can add some."""


_AS_BLANKS = bytes.maketrans(b"01", b" \t")
OPTIONAL = "optional"
"""Metadata key of a field that is omitted while it is None, because earlier readers reject it."""
BOUNDS = "bounds"
"""Metadata key of the smallest and the largest value of an integer field."""


def seal(body: bytes) -> bytes:
    """Return the checksum that follows a record: a line feed, then the crc32 of ``body``, highest
    bit first, with a space for 0 and a tab for 1.

    JSON allows whitespace after a value, so readers without support for the seal still accept the
    record.
    """
    crc = zlib.crc32(body)
    return b"\n" + f"{crc:032b}".encode().translate(_AS_BLANKS)


def unsealed(data: bytes, where: str) -> bytes:
    """Return ``data`` without its seal. Raises :class:`BadRecord` for a wrong seal; a record
    without a seal is from an earlier version."""
    body = data.rstrip(b" \t\r\n")
    found = data[len(body) :]
    if found not in (b"", b"\n", seal(body)):
        raise BadRecord(f"{where}: expected the checksum of the record, found another")
    return body


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base class of all records: strict JSON, with a :func:`seal` when written.

    ``LIMIT`` is the maximum size in bytes, ``CONTAINERS`` the maximum number of objects and lists
    that is read, well above the record of the largest group. ``VERSIONS`` are the protocol versions
    that are read: this one, unless the record outlives its run and has not changed.
    """

    LIMIT: ClassVar[int] = MEBIBYTE
    CONTAINERS: ClassVar[int] = MAX_CONTAINERS
    VERSIONS: ClassVar[tuple[int, ...]] = (PROTOCOL,)

    def to_bytes(self) -> bytes:
        """Serialize to compact JSON with a seal."""
        body = {"v": PROTOCOL, **_values(self)}
        text = json.dumps(body, separators=(",", ":"), allow_nan=True).encode()
        return text + seal(text)

    @classmethod
    def read(cls, store: Store, key: str) -> Self:
        """Read the record under a key.

        Raises :class:`BadRecord` for an invalid record and one larger than ``LIMIT``, and the
        store's errors, such as :class:`~diloco.store.base.MissingKey`.
        """
        try:
            data = store.get(key, limit=cls.LIMIT)
        except ObjectTooLarge as error:
            raise BadRecord(
                f"{cls.__name__}: expected at most {error.limit} bytes, found more"
            ) from None
        except NotAnObject as error:
            raise BadRecord(f"{cls.__name__}: {error}") from None
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a record. Raises :class:`BadRecord`."""
        if len(data) > cls.LIMIT:
            raise BadRecord(
                f"{cls.__name__}: expected at most {cls.LIMIT} bytes, found {len(data)}"
            )
        data = unsealed(data, cls.__name__)
        try:
            body = parse_json(data, containers=cls.CONTAINERS)
        except ValueError as error:
            raise BadRecord(f"{cls.__name__}: expected JSON, found {error}") from None
        version = body.pop("v", None) if isinstance(body, dict) else None
        if not isinstance(body, dict) or version not in cls.VERSIONS:
            raise BadRecord(
                f"{cls.__name__}: expected version {PROTOCOL}, found {abridged(version)}"
            )
        value = _read(cls, body, cls.__name__)
        assert isinstance(value, cls)
        return value


def _values(record: Any) -> dict[str, Any]:
    """Return the fields of a record, without the :data:`OPTIONAL` ones that are None; also in
    fields that are dataclasses themselves."""
    values = dataclasses.asdict(record)
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if f.metadata.get(OPTIONAL) and value is None:
            del values[f.name]
        elif dataclasses.is_dataclass(value):
            values[f.name] = _values(value)
    return values


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What :func:`_read` checks of a dataclass. Computed once, because a long log has hundreds of
    thousands of records."""

    hints: Mapping[str, Any]
    accepted: Mapping[str, frozenset[type]]
    """The types of each field's values that need no conversion."""
    required: frozenset[str]
    bounds: Mapping[str, tuple[int, int]]
    is_extensible: bool


@cache
def _shape(kind: type) -> _Shape:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    missing = dataclasses.MISSING
    return _Shape(
        hints={f.name: hints[f.name] for f in fields},
        accepted={f.name: _accepted(hints[f.name]) for f in fields},
        required=frozenset(
            f.name for f in fields if f.default is missing and f.default_factory is missing
        ),
        bounds={f.name: f.metadata[BOUNDS] for f in fields if BOUNDS in f.metadata},
        is_extensible=issubclass(kind, Extensible),
    )


def _accepted(hint: Any) -> frozenset[type]:
    """Return the types whose values a field with ``hint`` holds as they are, integers within
    :data:`INT_LIMIT`."""
    arguments = typing.get_args(hint) if _origin(hint) in (Union, types.UnionType) else (hint,)
    return frozenset(arguments) & {int, float, str, bool, type(None)}


_origin: Callable[[Any], Any] = cache(typing.get_origin)
_arguments: Callable[[Any], tuple[Any, ...]] = cache(typing.get_args)
_is_dataclass: Callable[[Any], bool] = cache(dataclasses.is_dataclass)


def _read(hint: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to the type ``hint``. Raises :class:`BadRecord`. Supports the types of
    record fields only."""
    if hint is Any:
        try:
            check_depth(value, where)
        except ValueError as error:
            raise BadRecord(str(error)) from None
        return value
    if _is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, dict):
            raise BadRecord(f"{where}: expected an object, found {type(value).__name__}")
        shape = _shape(hint)
        unknown = value.keys() - shape.hints.keys()
        if unknown and not shape.is_extensible:
            raise BadRecord(f"{where}: unknown field {abridged(min(unknown))}")
        if absent := shape.required - value.keys():
            name = next(name for name in shape.hints if name in absent)
            raise BadRecord(f"{where}: expected a field {name!r}, found none")
        known: dict[str, Any] = {}
        for name, item in value.items():
            accepted = shape.accepted.get(name)
            if accepted is None:
                continue
            kind = type(item)
            is_right = kind in accepted and (kind is not int or -INT_LIMIT <= item < INT_LIMIT)
            known[name] = item if is_right else _read(shape.hints[name], item, f"{where}.{name}")
        for name, (smallest, largest) in shape.bounds.items():
            number = known.get(name)
            if number is not None and not smallest <= number <= largest:
                raise BadRecord(f"{where}.{name}: expected {smallest} to {largest}, found {number}")
        return hint(**known)
    origin, arguments = _origin(hint), _arguments(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise BadRecord(f"{where}: expected a list, found {type(value).__name__}")
        # A segment's columns have hundreds of numbers: check one by one only if types differ.
        if arguments[0] is float and set(map(type, value)) <= {float}:
            return tuple(value)
        if arguments[0] is int and set(map(type, value)) <= {int}:
            for item in (min(value), max(value)) if value else ():
                _read(int, item, where)
            return tuple(value)
        return tuple(_read(arguments[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise BadRecord(f"{where}: expected an object, found {type(value).__name__}")
        return {k: _read(arguments[1], v, where) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise BadRecord(f"{where}: expected a float, found a number out of range") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise BadRecord(f"{where}: expected {hint.__name__}, found {abridged(value)}")
    if hint is int and not -INT_LIMIT <= value < INT_LIMIT:
        raise BadRecord(f"{where}: expected an integer of 64 bits, found {abridged(value)}")
    return value
