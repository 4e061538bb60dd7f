"""Parse the text of a document: JSON, TOML or YAML, in time linear in its size.

The three parsers of the standard library and PyYAML need bounds first: Python's TOML parser takes
quadratic time for dotted keys (20 KB: 20 s), and YAML's anchors let a few lines describe billions
of values. Here anchors are refused, levels are limited, and scalars have the types of the core
schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): ``3e-4`` is a number and ``on``
is text, as in JSON and TOML.

Values that a database column, a hash or a comparison cannot handle are rejected: numbers that are
not finite or not exact in JSON, text that is not valid Unicode, NUL, dates, and deep nesting.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import yaml

Format = Literal["json", "toml", "yaml"]

DEEPEST = 20
LARGEST = 2**53
JSON_BYTES = 1_000_000
TEXT_BYTES = 64_000
"""Largest TOML or YAML document: their parsers are slow."""

_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\(?:.|\Z))*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\(?:.|\Z))*(?:"|$|\Z)'
    r"|'[^'\n]*(?:'|$|\Z)"
    r"|#[^\n]*",
    re.DOTALL | re.MULTILINE,
)
"""Every alternative also ends at the end of the text, so that one scan takes linear time."""
_SPACE_AT_DOT = re.compile(r"(?<![ \t])[ \t]*\.[ \t]*")
_MANY_PARTS = re.compile(rf"(?<![\w-])(?:[\w-]*\.){{{DEEPEST}}}")
_TOML_LINE = re.compile(r"\[|[\w\"'.-]+[ \t]*=")


class Unfit(ValueError):
    """A value that JSON, TOML or YAML can express and a document cannot contain."""


def format_of(text: str) -> Format:
    """The format of a pasted text, by its first line that is not a comment."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if first.startswith("{"):
        return "json"
    return "toml" if _TOML_LINE.match(first) else "yaml"


def limit_of(format: Format) -> int:
    return JSON_BYTES if format == "json" else TEXT_BYTES


def parse(text: str, format: Format) -> Any:
    """The value of a text that is not longer than :func:`limit_of`. Raises ``ValueError``;
    :class:`Unfit` for a value that a document cannot contain."""
    try:
        body = _PARSERS[format](text)
    except RecursionError:
        raise ValueError("expected a document, found one nested too deeply") from None
    check_value(body)
    return body


def read_document(text: str) -> dict[str, Any]:
    """The document in a pasted text of any format. Raises ``ValueError``."""
    format = format_of(text)
    if not text.strip():
        raise ValueError("expected a document as JSON, TOML or YAML, found an empty text")
    if len(text.encode(errors="replace")) > TEXT_BYTES:
        raise ValueError(f"expected at most {TEXT_BYTES:,} bytes, found {len(text):,} characters")
    try:
        body = parse(text, format)
    except ValueError as error:
        raise ValueError(f"not valid {format.upper()}: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"expected a document with names and values, found {str(body)[:40]!r}")
    return body


def check_toml_keys(text: str) -> None:
    """Raise :class:`Unfit` for a dotted key of more than :data:`DEEPEST` parts."""
    keys = _SPACE_AT_DOT.sub(".", _STRING_OR_COMMENT.sub("_", text))
    if _MANY_PARTS.search(keys):
        raise Unfit(f"expected keys of at most {DEEPEST} parts, found more")


def check_value(value: Any, *, depth: int = 0) -> None:
    """Raise :class:`Unfit` for a value that a document cannot contain."""
    if depth > DEEPEST:
        raise Unfit(f"expected at most {DEEPEST} levels, found more")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Unfit(f"expected names that are text, found {str(key)[:24]}")
            _check_text(key)
            check_value(item, depth=depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_value(item, depth=depth + 1)
    elif isinstance(value, str):
        _check_text(value)
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise Unfit(f"expected whole numbers up to 2^53, found {str(value)[:24]}…")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Unfit(f"expected finite numbers, found {value}")
    else:
        raise Unfit(f"expected no date or time, found {value}")


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise Unfit("expected text without NUL, found one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unfit("expected Unicode text, found half of a surrogate pair") from None


def _refuse_constant(name: str) -> Any:
    raise Unfit(f"expected finite numbers, found {name}")


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with unique names, as in TOML and YAML."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise Unfit(f"expected {names.most_common(1)[0][0][:80]!r} once, found it twice")
    return result


def _toml(text: str) -> Any:
    check_toml_keys(text)
    return tomllib.loads(text)


class _Loader(yaml.SafeLoader):
    """YAML without anchors, tags and merge keys, of limited depth, with unique names."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def fetch_more_tokens(self) -> Any:
        if self.flow_level > DEEPEST or len(self.indents) > DEEPEST + 1:
            raise Unfit(f"expected at most {DEEPEST} levels, found more")
        return super().fetch_more_tokens()

    def fetch_anchor(self) -> Any:
        raise Unfit(f"expected no anchor (&), found one in line {self.line + 1}")

    def fetch_alias(self) -> Any:
        raise Unfit(f"expected no alias (*), found one in line {self.line + 1}")

    def fetch_tag(self) -> Any:
        raise Unfit(f"expected no tag (!), found one in line {self.line + 1}")

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise Unfit(f"expected names that are text, found {str(key)[:24]}")
            if key in result:
                raise Unfit(f"expected {key!r} once, found it twice")
            result[key] = self.construct_object(value_node, deep=deep)
        return result


def _core(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_core("null", r"(?:~|null|Null|NULL|)\Z", "~nN")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"\Z"), [""])
_core("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", "tTfF")
_core("int", r"[-+]?[0-9]+\Z", "-+0123456789")
_core("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z", "-+.0123456789")
_core("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z", "-+.")


def _number(kind: type[int] | type[float]) -> Callable[[_Loader, Any], Any]:
    def construct(loader: _Loader, node: Any) -> Any:
        text = str(loader.construct_scalar(node)).lower()
        return kind(text.replace(".inf", "inf").replace(".nan", "nan"))

    return construct


_Loader.add_constructor("tag:yaml.org,2002:int", _number(int))
_Loader.add_constructor("tag:yaml.org,2002:float", _number(float))


def _yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    except OverflowError:  # "\UFFFFFFFF"
        raise ValueError(
            "expected an escape of a Unicode character, found a larger number"
        ) from None


_PARSERS: dict[Format, Callable[[str], Any]] = {"json": _json, "toml": _toml, "yaml": _yaml}
