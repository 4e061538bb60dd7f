"""The API's OpenAPI document as plain rows for the page ``/api/docs``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dashboard.presentation.api_commands import COMMANDS

DEEPEST = 3
"""Levels of nested objects that are listed."""
_METHODS = ("get", "post", "put", "patch", "delete")
_EXAMPLES: dict[str, Any] = {
    "run_id": "6f1d2c3b-8a94-4c1e-9b1f-2f6f0a7c5d10",
    "number": 3,
    "attempt": 1,
    "pool_id": 12,
    "table": "points",
    "format": "csv",
    "backend": "modal",
    "hardware": "H100",
    "scheme": "s3",
    "name": "olga",
}
_MEANINGS = {
    "200": "OK",
    "201": "Created",
    "202": "Accepted",
    "400": "The body is not JSON or TOML",
    "401": "No valid token",
    "403": "The scope or role is insufficient",
    "404": "Not found",
    "409": "The state does not allow it",
    "413": "The body is too large",
    "422": "A field has an invalid value",
    "501": "Not available on this server",
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A parameter, or a field of a body or an answer. ``name`` is a path: ``pools[].count``."""

    name: str
    type: str
    where: str = ""
    required: bool = False
    default: str = ""
    bounds: str = ""
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: str
    meaning: str
    type: str
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operation:
    id: str
    method: str
    path: str
    summary: str
    help: str
    parameters: tuple[Field, ...]
    body: tuple[Field, ...]
    body_type: str
    body_help: str
    answers: tuple[Answer, ...]
    curl: str
    """``$SERVER`` is the address of the server, ``$TOKEN`` a token."""
    command: str


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    title: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True, kw_only=True)
class Reference:
    version: str
    sections: tuple[Section, ...]
    problem: tuple[Field, ...]
    """Fields of the answer of every error."""


def reference(schema: Mapping[str, Any]) -> Reference:
    """The reference of an OpenAPI document, in the order of its tags."""
    sections: dict[str, list[Operation]] = {}
    reader = _Reader(schema)
    for path, methods in schema["paths"].items():
        for method in _METHODS:
            if method in methods:
                tag = next(iter(methods[method].get("tags", ())), "other")
                sections.setdefault(tag, []).append(reader.operation(path, method, methods[method]))
    return Reference(
        version=str(schema["info"]["version"]),
        sections=tuple(
            Section(name=tag, title=tag.capitalize(), operations=tuple(operations))
            for tag, operations in sections.items()
        ),
        problem=tuple(reader.fields({"$ref": "#/components/schemas/Problem"})),
    )


class _Reader:
    """Resolves references into the document's components."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._components: Mapping[str, Any] = schema.get("components", {}).get("schemas", {})

    def operation(self, path: str, method: str, found: Mapping[str, Any]) -> Operation:
        body = found.get("requestBody", {}).get("content", {})
        media, body_schema = next(
            ((m, content.get("schema", {})) for m, content in body.items()), ("", {})
        )
        lines = str(found.get("description") or found.get("summary") or "").strip()
        first, _, rest = " ".join(lines.split()).partition(". ")
        return Operation(
            id=str(found.get("operationId", f"{method}{path}")).rsplit("_api_", 1)[-1],
            method=method.upper(),
            path=path,
            summary=first.rstrip(".").replace("``", ""),
            help=rest.replace("``", "`"),
            parameters=tuple(self._parameter(p) for p in found.get("parameters", ())),
            body=tuple(self.fields(body_schema)) if body else (),
            body_type=f"{media}: {self._type(body_schema)}" if body else "",
            body_help=self._help(self._resolved(body_schema)) if body else "",
            answers=tuple(self._answers(found.get("responses", {}))),
            curl=self._curl(path, method, media, body_schema),
            command=COMMANDS.get(_name(found), ""),
        )

    def _parameter(self, found: Mapping[str, Any]) -> Field:
        schema = found.get("schema", {})
        return Field(
            name=str(found["name"]),
            where=str(found["in"]),
            type=self._type(schema),
            required=bool(found.get("required")),
            default=_default(schema),
            bounds=_bounds(self._resolved(schema)),
            help=str(found.get("description") or schema.get("description") or ""),
        )

    def _answers(self, found: Mapping[str, Any]) -> Iterator[Answer]:
        for status, response in sorted(found.items(), key=lambda item: str(item[0])):
            content: Mapping[str, Any] = next(iter(response.get("content", {}).values()), {})
            schema = content.get("schema", {})
            is_error = str(status) >= "400"
            yield Answer(
                status=str(status),
                meaning=_MEANINGS.get(str(status), response.get("description", "")),
                type="" if is_error else self._type(schema),
                fields=() if is_error else tuple(self.fields(schema)),
            )

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema that a reference, or the only branch that is not null, leads to."""
        for _ in range(8):
            if "$ref" in schema:
                schema = self._components.get(schema["$ref"].rsplit("/", 1)[-1], {})
                continue
            branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
            others = [b for b in branches or () if b.get("type") != "null"]
            if len(others) != 1:
                break
            schema = others[0]
        return schema

    def fields(
        self, schema: Mapping[str, Any], prefix: str = "", depth: int = 0
    ) -> Iterator[Field]:
        """The fields of an object, or of the objects of a list, and of those in them."""
        found = self._resolved(schema)
        if found.get("type") == "array":
            yield from self.fields(found.get("items", {}), f"{prefix}[]", depth)
            return
        if depth >= DEEPEST:
            return
        required = set(found.get("required", ()))
        for name, child in found.get("properties", {}).items():
            path = f"{prefix}.{name}".lstrip(".")
            yield Field(
                name=path,
                type=self._type(child),
                required=name in required,
                default=_default(child),
                bounds=_bounds(self._resolved(child)),
                help=self._help(child),
            )
            yield from self.fields(child, path, depth + 1)

    def _type(self, schema: Mapping[str, Any]) -> str:
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            return " or ".join(dict.fromkeys(self._type(branch) for branch in branches))
        if "$ref" in schema:
            return str(self._resolved(schema).get("title") or schema["$ref"].rsplit("/", 1)[-1])
        kind = schema.get("type", "any")
        if kind == "array":
            return f"list of {self._type(schema.get('items', {}))}"
        if schema.get("format") in ("uuid", "date", "date-time", "binary"):
            return str(schema["format"])
        return str(kind)

    def _help(self, schema: Mapping[str, Any]) -> str:
        return " ".join(str(schema.get("description", "")).replace("``", "`").split())

    def _curl(self, path: str, method: str, media: str, body: Mapping[str, Any]) -> str:
        address = re.sub(r"\{(?:\w+:)?(\w+)\}", lambda m: str(_EXAMPLES.get(m[1], 1)), path)
        words = ["curl"]
        if method != "get":
            words.append(f"-X {method.upper()}")
        words.append('-H "Authorization: Bearer $TOKEN"')
        if media:
            words.append(f"-H 'Content-Type: {media}'")
            if media == "application/json":
                words.append(f"-d '{json.dumps(self._example(body))}'")
            else:
                words.append("--data-binary @code.zip")
        return " ".join([*words, f"$SERVER{address}"])

    def _example(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """A value with the required fields of an object, or its first ones."""
        found = self._resolved(schema)
        if "default" in found and depth:
            return found["default"]
        if "enum" in found or "const" in found:
            return found.get("const") or found["enum"][0]
        kind = found.get("type")
        if kind == "object":
            properties = found.get("properties", {})
            wanted = found.get("required") or list(properties)[:1]
            return {
                name: self._example(properties.get(name, {}), depth + 1)
                for name in (wanted if depth < DEEPEST else ())
            }
        if kind == "array":
            return [self._example(found.get("items", {}), depth + 1)] if depth < DEEPEST else []
        if kind == "string":
            return "2026-01-31T12:00:00Z" if found.get("format") == "date-time" else "text"
        return {"boolean": True, "integer": 1, "number": 1.0}.get(str(kind))


def _name(found: Mapping[str, Any]) -> str:
    """The name of the operation's function."""
    return re.sub(r"^dashboard_api_[a-z]+_", "", str(found.get("operationId", "")))


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else json.dumps(default)


def _bounds(schema: Mapping[str, Any]) -> str:
    """The bounds of a value in words."""
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    parts = []
    for name, words in (
        ("minimum", "{} or more"),
        ("exclusiveMinimum", "more than {}"),
        ("maximum", "at most {}"),
        ("maxLength", "at most {} characters"),
        ("maxItems", "at most {} items"),
    ):
        if name in schema:
            parts.append(words.format(f"{schema[name]:,}"))
    return "; ".join(parts)
