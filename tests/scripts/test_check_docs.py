"""The check of the docs finds each kind of outdated statement."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_docs import check


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose docs have no problem."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "dashboard" / "management" / "commands").mkdir(parents=True)
    (tmp_path / "dashboard" / "management" / "commands" / "serve.py").touch()
    (tmp_path / "dashboard" / "settings.py").write_text(
        'os.environ.get("ARCHIPELAGO_PORT")\n_flag("DATABASE_URL", False)\n'
    )
    (tmp_path / "Makefile").write_text("test: python ## all tests\n\nhelp: ## this\n")
    (tmp_path / "README.md").write_text(
        "# Title\n\n## What it *is*, `really`\n\n"
        "[a](docs/more.md#deep-down) [b](#what-it-is-really)\n"
        "`make test`, `manage.py serve`, `ARCHIPELAGO_PORT`, [site](https://example.org/x)\n"
        "```\n[not a link](nowhere.md)\n```\n"
    )
    (tmp_path / "docs" / "more.md").write_text("## Deep down\n\n`DATABASE_URL`\n")
    return tmp_path


def test_correct_docs_have_no_problem(tree: Path) -> None:
    assert check(tree) == []


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("docs/new.md", "[x](gone.md)", "docs/new.md: broken link gone.md"),
        ("docs/new.md", "![x](gone.png)", "docs/new.md: broken link gone.png"),
        ("docs/new.md", "[x](more.md#up)", "docs/new.md: no heading for link more.md#up"),
        ("docs/new.md", "`ARCHIPELAGO_OLD`", "docs: ARCHIPELAGO_OLD is documented, but nothing"),
        ("docs/new.md", "`runs/gone.py` `diloco/x`", "docs/new.md: runs/gone.py does not exist"),
        ("docs/new.md", "`make cake`", "docs: make cake is documented, but there is no such"),
        (
            "dashboard/new.py",
            'os.environ["SOME_NAME"]',
            "dashboard/new.py: the environment variable SOME_NAME is not documented",
        ),
        ("dashboard/new.py", 'X = "ARCHIPELAGO_NEW"', "dashboard/new.py: the environment variable"),
        (
            "dashboard/management/commands/new.py",
            "",
            "dashboard/management/commands/new.py: the command manage.py new is not documented",
        ),
        ("Makefile", "test: ## t\n\nnew: ## n\n", "Makefile: the target new is not documented"),
    ],
)
def test_outdated_docs_are_reported(tree: Path, path: str, text: str, problem: str) -> None:
    (tree / path).write_text(text)
    (message,) = check(tree)
    assert message.startswith(problem)
