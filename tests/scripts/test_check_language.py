from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from scripts import check_language
from scripts.check_language import ALLOWED, RULES, check_file, tracked_files


def _findings(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text)
    return [(finding.line, finding.text) for finding in check_file(path, tmp_path)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.md", "Fine.\n\nThe registry is told.\n", [(3, "told")]),
        ("a.md", "Jobs that nobody\nhas ended.\n", [(1, "nobody")]),
        (
            "a.md",
            "It leaves of its\nown accord, with a pod of its own.\n",
            [(1, "of its own accord"), (2, "of its own")],
        ),
        ("a.md", "One. What is final\nends.\n", [(1, "What is final ends.")]),
        ("a.html", '<p title="Nobody is here">{{ value }}</p>\n', [(1, "Nobody")]),
        ("a.py", "# Fine.\n# It says so.\nx = 1  # whoever\n", [(2, "says"), (3, "whoever")]),
        ("a.py", '"""Fine.\n\nA ledger of rounds.\n"""\n', [(3, "ledger")]),
        ("a.py", 'raise ValueError(f"{name} is told")\n', [(1, "told")]),
        ("a.py", "told_at = LedgerEntry = 1\n", [(1, "LedgerEntry"), (1, "told_at")]),
        ("a.py", "def test_what_somebody_did(): ...\n", [(1, "test_what_somebody_did")]),
        ("a.py", 'LABEL = "Nobody"\n', [(1, "Nobody")]),
        ("a.js", "// It is told.\n\nb = 'the page says';\n", [(1, "told"), (3, "says")]),
        ("a.js", "/* One.\n   Two says. */\n", [(2, "says")]),
        ("a.js", "const a = `${name} is told`;\n", [(1, "told")]),
        ("b.yml", "# Whoever starts it\n", [(1, "Whoever")]),
    ],
)
def test_a_word_is_found_with_its_line(
    tmp_path: Path, name: str, text: str, expected: list[tuple[int, str]]
) -> None:
    assert _findings(tmp_path, name, text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "What is a replica? See https://example.org/what-he-said for the essay.\n"),
        ("a.md", "# What is where\n\nThe glossary has the terms.\n"),
        ("a.py", 'row["told"] = file.tell()\nURL = "https://example.org/told"\n'),
        ("a.py", "def tell(self) -> int: ...\n"),
        ("a.js", "const told = row['told'];\nconst url = 'https://a.b/c';\n"),
        ("a.png", "told"),
    ],
)
def test_technical_english_passes(tmp_path: Path, name: str, text: str) -> None:
    assert _findings(tmp_path, name, text) == []


def test_an_allowed_word_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_language, "ALLOWED", (("quotes.md", "told", "a quotation"),))
    assert _findings(tmp_path, "quotes.md", "told, said") == [(1, "said")]
    assert _findings(tmp_path, "other.md", "told") == [(1, "told")]


def test_the_tables_are_in_use() -> None:
    root = Path(check_language.__file__).parent.parent
    names = [path.relative_to(root).as_posix() for path in tracked_files(root)]
    for pattern, _text, reason in ALLOWED:
        assert reason and any(fnmatch(name, pattern) for name in names), pattern
    assert all(rule.words and rule.instead for rule in RULES)
