"""Statements of docs/security.md that the code can confirm."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboard.api import document_text
from dashboard.live import feed
from executors.registry import BACKENDS, pool_options
from runs import local_access, permissions
from runs.submit.uploads import ARCHIVE_BYTES
from tests.browser import seed

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "security.md").read_text()


def table(first: str) -> list[list[str]]:
    """Rows of the table whose header starts with ``first``, with the header."""
    rows = []
    for line in TEXT[TEXT.index(f"| {first} |") :].splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


@pytest.mark.django_db
def test_the_table_of_roles(settings: Any) -> None:
    settings.OPERATORS_LOCAL = "none"
    head, *rows = table("permission")
    users = [seed.user(f"the-{role}", role) for role in head[1:]]
    other = seed.run(seed.user("other", "operator"), committed=0)
    checks: dict[str, Callable[[Any], bool]] = {
        "see runs": permissions.can_view,
        "create runs": permissions.can_submit,
        "act on own runs": lambda user: permissions.can_operate(
            user, seed.run(user, name=f"of {user}", committed=0)
        ),
        "act on runs of others": lambda user: permissions.can_operate(user, other),
        "use the local backend": local_access.can_use_local,
        "run custom code locally": local_access.can_run_code_locally,
        "manage users and credentials": lambda user: permissions.has_role(user, "admin"),
    }
    assert [row[0] for row in rows] == list(checks)
    for name, *cells in rows:
        assert cells == ["yes" if checks[name](user) else "no" for user in users], name


def test_the_table_of_pool_options() -> None:
    _, *rows = table("backend")
    written = {re.sub("`", "", name): re.findall(r"`(\w+)`", cell) for name, cell in rows}
    assert written == {backend: sorted(pool_options(backend)) for backend in written}
    assert set(written) <= set(BACKENDS)


def test_the_limits() -> None:
    assert document_text.JSON_BYTES == 1_000_000
    assert document_text.TEXT_BYTES == 64_000
    assert ARCHIVE_BYTES == 20_000_000
    assert document_text.DEEPEST == 20
    assert (feed.PER_SESSION, feed.PER_USER) == (8, 24)


def test_settings_and_commands_that_the_docs_name_exist() -> None:
    code = "".join(
        p.read_text() for f in ("dashboard", "executors") for p in (ROOT / f).rglob("*.py")
    )
    for name in set(re.findall(r"ARCHIPELAGO_\w+", TEXT)):
        assert name in code, name
    for name in set(re.findall(r"manage\.py (\w+)", TEXT)) - {"check"}:
        assert list(ROOT.glob(f"*/management/commands/{name}.py")), name
    for link in re.findall(r"\]\(([\w./-]+\.md)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
