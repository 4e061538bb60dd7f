"""``group.json``: the only source of a group's settings for its replicas.

The process that creates the group writes it once. No flag or environment variable overrides any of
its values.

Errors: :class:`ProtocolMismatch` for a document of another protocol version;
:class:`~diloco.protocol.settings.SettingsError` names any other invalid field.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol import keys
from diloco.protocol.parsing import abridged, check_storable, parse_json
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import ObjectTooLarge, Store

PROTOCOL = 3
"""Version of the object layout and of the record formats. All processes of a group must use the
same."""

GROUP_FORMAT = "archipelago.group"
GROUP_LIMIT = 4 << 20
"""Size limit in bytes: a workload's settings can contain long text."""


class ProtocolMismatch(ValueError):
    """``group.json`` was written for another protocol version."""


_TYPES = {"run_id": str, "name": str, "code": str, "settings": dict, "workload": dict}
_NAMES = {str: "a text", dict: "an object"}


def canonical_json(value: Any) -> bytes:
    """Serialize to JSON with one spelling per value, so that equal documents have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def fingerprint_of(data: bytes) -> str:
    """Return the fingerprint of the bytes of a ``group.json`` without validating its settings; ''
    if it is not a JSON object."""
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
    """``group.json``: the complete configuration of a group.

    ``workload`` is a JSON object whose ``kind`` names the workload. ``code`` is the sha256 of the
    bundle under ``code/``, or '' if the replica library is installed where replicas run.
    """

    run_id: str
    name: str
    settings: GroupSettings
    workload: Mapping[str, Any]
    code: str = ""

    @classmethod
    def new(
        cls, settings: GroupSettings, *, name: str = "", workload: Mapping[str, Any] | None = None
    ) -> GroupDocument:
        """Return the document of a new run; without a workload, replicas bring their own model and
        data."""
        return cls(
            run_id=secrets.token_hex(8),
            name=name or "group",
            settings=settings,
            workload=workload or {"kind": "caller"},
        )

    @property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 of the whole document except the fingerprint."""
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
        """Serialize the document, including its fingerprint."""
        body = self._body() | {"fingerprint": self.fingerprint}
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def read(cls, store: Store) -> GroupDocument:
        """Read the document of a rendezvous. Raises the errors of :meth:`from_bytes` and of the
        store."""
        try:
            return cls.from_bytes(store.get(keys.GROUP, limit=GROUP_LIMIT))
        except ObjectTooLarge as error:
            raise SettingsError("", str(error)) from None

    @classmethod
    def from_bytes(cls, data: bytes) -> GroupDocument:
        """Parse and verify ``group.json``.

        Raises :class:`ProtocolMismatch` for another protocol version, :class:`SettingsError` for
        any other invalid content.
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
                f"group.json: expected protocol {PROTOCOL}, the version of this library, "
                f"found protocol {abridged(body.get('protocol'))}"
            )
        for name, kind in _TYPES.items():
            value = body.get(name)
            if not isinstance(value, kind):
                expected = _NAMES[kind]
                raise SettingsError(
                    "", f"group.json: {name}: expected {expected}, found {abridged(value)}"
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
