"""The texts of source files in which code can name something, e.g. a backend or a codec."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".js", ".html")


def files_that_name(pattern: re.Pattern[str], folders: Iterable[str]) -> set[str]:
    """The product files of ``folders``, relative to the repository, whose code matches."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES
        and pattern.search(path.read_text())
        and any(pattern.search(text) for text in code_of(path))
    }


def code_of(path: Path) -> list[str]:
    """The texts of a file that can name a backend: of Python, imports and all texts but docstrings;
    of other files, every line without the *modal* dialogs of HTML."""
    text = path.read_text()
    if path.suffix != ".py":
        return [re.sub(r"aria-modal|showModal|:modal|modal dialog", "", text)]
    tree = ast.parse(text)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    nodes = list(ast.walk(tree))
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]
    imports = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imports += [
        each.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
    ]
    return texts + imports
