"""``group.json``: the only place a replica reads its group's settings from.

Written once by whoever makes the group; there is no flag and no environment variable that
overrides anything in it.

Errors: :class:`ProtocolMismatch` says that it speaks another protocol than this library;
:class:`~diloco.protocol.settings.SettingsError` names what else is wrong with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol import keys
from diloco.protocol.parsing import abridged, check_storable, parse_json
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import ObjectTooLarge, Store

PROTOCOL = 2
"""Version of the object layout and of the record formats. Both sides must speak the same."""

GROUP_FORMAT = "archipelago.group"
GROUP_LIMIT = 4 << 20
"""Bytes of the document: a workload's own settings may hold a lot of text."""


class ProtocolMismatch(ValueError):
    """``group.json`` was written for another protocol version."""


_TYPES = {"run_id": str, "name": str, "code": str, "settings": dict, "workload": dict}
_NAMES = {str: "a text", dict: "an object"}


def canonical_json(value: Any) -> bytes:
    """One spelling per value, so that equal documents have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def fingerprint_of(data: bytes) -> str:
    """The fingerprint of a ``group.json`` as it is, whatever the settings of this library are; ''
    for what is no JSON object."""
    try:
        body = parse_json(data)
        check_storable(body, "JSON")
    except ValueError:
        return ""
    if not isinstance(body, dict):
        return ""
    body.pop("fingerprint", None)
    return hashlib.sha256(canonical_json(body)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class GroupDocument:
    """``group.json``: what a replica has to know, and all it is told.

    ``workload`` is a JSON object whose ``kind`` names the workload; ``code`` is the sha256 of the
    bundle under ``code/``, or '' when the replica library is installed where replicas run.
    """

    run_id: str
    name: str
    settings: GroupSettings
    workload: Mapping[str, Any]
    code: str = ""

    @property
    def fingerprint(self) -> str:
        """sha256 of everything in the document but the fingerprint itself."""
        return hashlib.sha256(canonical_json(self._body())).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {
            "format": GROUP_FORMAT,
            "protocol": PROTOCOL,
            "run_id": self.run_id,
            "name": self.name,
            "settings": self.settings.to_dict(),
            "workload": dict(self.workload),
            "code": self.code,
        }

    def to_bytes(self) -> bytes:
        body = self._body() | {"fingerprint": self.fingerprint}
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def read(cls, store: Store) -> GroupDocument:
        """The document of a rendezvous. Raises as :meth:`from_bytes`, and what the store raises."""
        try:
            return cls.from_bytes(store.get(keys.GROUP, limit=GROUP_LIMIT))
        except ObjectTooLarge as error:
            raise SettingsError("", str(error)) from None

    @classmethod
    def from_bytes(cls, data: bytes) -> GroupDocument:
        """Parse and verify ``group.json``.

        Raises :class:`ProtocolMismatch` for another protocol, :class:`SettingsError` for anything
        else that is not as it should be.
        """
        try:
            body = parse_json(data)
            check_storable(body, "JSON")
        except ValueError as error:
            raise SettingsError("", f"group.json: expected JSON, found {error}") from None
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        if found != GROUP_FORMAT:
            raise SettingsError(
                "", f"group.json: expected format {GROUP_FORMAT!r}, found {abridged(found)}"
            )
        if body.get("protocol") != PROTOCOL:
            raise ProtocolMismatch(
                f"group.json: this library speaks protocol {PROTOCOL}, "
                f"found protocol {abridged(body.get('protocol'))}"
            )
        for name, kind in _TYPES.items():
            value = body.get(name)
            if not isinstance(value, kind):
                wanted = _NAMES[kind]
                raise SettingsError(
                    "", f"group.json: {name}: expected {wanted}, found {abridged(value)}"
                )
        try:
            document = cls(
                run_id=body["run_id"],
                name=body["name"],
                settings=GroupSettings.from_dict(body["settings"]),
                workload=body["workload"],
                code=body["code"],
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise SettingsError("", f"group.json: malformed ({abridged(error)})") from None
        if body.get("fingerprint") != document.fingerprint:
            raise SettingsError(
                "",
                f"group.json: expected fingerprint {document.fingerprint}, "
                f"found {abridged(body.get('fingerprint'))}",
            )
        return document
