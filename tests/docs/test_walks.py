"""The walks of docs/walks.md: each file and name exists, and each heading counts its files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALKS = re.findall(
    r"^## ([^\n]+): (\d+) files\n(.*?)(?=^## |\Z)",
    (ROOT / "docs" / "walks.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
STEP = re.compile(r"^\| `([\w./]+)` \| (.+) \|$", re.MULTILINE)
STEPS = [(title, file, text) for title, _, walk in WALKS for file, text in STEP.findall(walk)]


def test_all_walks_are_read() -> None:
    text = (ROOT / "docs" / "walks.md").read_text()
    assert len(WALKS) == text.count("\n## ") == 5


@pytest.mark.parametrize(("title", "number", "walk"), WALKS, ids=[walk[0] for walk in WALKS])
def test_the_heading_counts_the_files(title: str, number: str, walk: str) -> None:
    files = [file for file, _ in STEP.findall(walk)]
    assert len(files) == walk.count("\n| ") - 2, "a row that is not a step"
    assert len(set(files)) == len(files) == int(number)


@pytest.mark.parametrize(
    ("file", "text"), [step[1:] for step in STEPS], ids=[f"{t}-{f}" for t, f, _ in STEPS]
)
def test_a_step_names_what_its_file_contains(file: str, text: str) -> None:
    source = (ROOT / file).read_text()
    for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
        if name.endswith(".json"):
            continue
        holder, _, member = name.rpartition(".")
        assert re.search(rf"\b{member}\b", source), f"{file}: {name}"
        if holder and file.endswith(".py"):
            assert re.search(rf"    def {member}\(", _class(source, holder)), f"{file}: {name}"


def _class(source: str, name: str) -> str:
    """The source of a class, '' if there is none of this name."""
    tree = ast.parse(source)
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return "".join(ast.get_source_segment(source, node) or "" for node in nodes)
