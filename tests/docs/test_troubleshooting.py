"""Every message that the docs quote exists in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/troubleshooting.md",)
SOURCES = ("diloco", "executors", "runs", "dashboard", "archipelago")
_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_GAP = re.compile(r"…|\.\.\.|<[a-z ]+>")


@cache
def _strings() -> tuple[str, ...]:
    """Every string of the product, with a gap for each value of an f-string."""
    return tuple(
        text
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in _strings_of(ast.parse(path.read_text()))
    )


def _strings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(map(str, parts))


def _quoted() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for message in _ROW.findall((ROOT / page).read_text()):
            if re.search(r"[a-z] [a-z]", message):
                yield page, message


@pytest.mark.parametrize(("page", "message"), list(_quoted()))
def test_a_quoted_message_exists(page: str, message: str) -> None:
    parts = [part.strip(" :,") for part in _GAP.split(message)]
    parts = [part for part in parts if len(part) > 3]
    missing = f"{page} quotes a message that the code does not have: {message}"
    assert any(all(part in text for part in parts) for text in _strings()), missing


def test_a_message_that_does_not_exist_is_found() -> None:
    assert not any("expected a purple replica" in text for text in _strings())
