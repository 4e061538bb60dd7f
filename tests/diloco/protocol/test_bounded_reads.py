"""Every read of a record has a size limit, in the control plane and in replicas."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.protocol import keys
from diloco.protocol.group_document import GROUP_LIMIT, GroupDocument
from diloco.protocol.parsing import abridged, check_depth, parse_json
from diloco.protocol.records import (
    BadRecord,
    Command,
    Commit,
    ContributionRecord,
    Heartbeat,
    Record,
)
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import LocalStore

ROOT = Path(__file__).parents[3]
STORES = {"store", "_store", "inner", "source", "into", "access"}
GET = re.compile(rf"\b(?:{'|'.join(sorted(STORES))})\s*\.\s*get\b")
PAYLOADS = {
    "runs/export/hub_files.py",  # files of the Hub, which is not read through a store
    "diloco/preflight.py",  # an object that this process has just written
}


def unlimited_gets(source: str) -> Iterator[int]:
    """Return the lines that call a store's ``get`` with a key only."""
    if not GET.search(source):
        return  # parsing takes seconds for all files
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        limited = any(keyword.arg == "limit" for keyword in node.keywords)
        if node.func.attr == "get" and name in STORES and not limited:
            yield node.lineno


def test_every_read_of_a_record_has_a_limit() -> None:
    result = {
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("diloco", "runs", "dashboard", "executors", "archipelago")
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in PAYLOADS
        for line in unlimited_gets(path.read_text())
    }
    assert result == set()


def test_the_search_finds_an_unlimited_read() -> None:
    assert list(unlimited_gets("x = self._store.get(key)\ny = store.get(key, limit=1)")) == [1]


def sparse(store: LocalStore, key: str) -> None:
    path = store.root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(3 * 10**9)


@pytest.mark.parametrize("kind", [Heartbeat, Commit, Command, ContributionRecord])
def test_a_sparse_record_of_gigabytes_is_not_read(tmp_path: Path, kind: type[Record]) -> None:
    store = LocalStore(tmp_path)
    sparse(store, "rounds/00000001/commit.json")
    with pytest.raises(BadRecord, match=f"{kind.__name__}: expected at most {kind.LIMIT} bytes"):
        kind.read(store, keys.commit(1))


def test_a_sparse_group_document_is_not_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    sparse(store, keys.GROUP)
    with pytest.raises(SettingsError, match=f"at most {GROUP_LIMIT} bytes"):
        GroupDocument.read(store)


def body(**more: str) -> bytes:
    fields = {
        "v": "3",
        "n": "1",
        "command": '"stop"',
        "replica": "null",
        "arguments": "{}",
        "wall_s": "1.0",
        **more,
    }
    return ("{" + ",".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


@pytest.mark.parametrize(
    ("field", "text", "where"),
    [
        ("n", '"one"', "Command.n: expected int"),
        ("n", "1e400", "Command.n: expected int"),
        ("n", "true", "Command.n: expected int"),
        ("n", str(2**63), "Command.n: expected an integer of 64 bits"),
        ("n", str(-(10**400)), "Command.n: expected an integer of 64 bits"),
        ("n", "9" * 5000, "Command: expected JSON"),
        ("wall_s", "9" * 400, "Command.wall_s: expected a float"),
        ("command", "[" * 500 + "]" * 500, "Command.command: expected str"),
        ("arguments", '{"a": ' + "[" * 40 + "]" * 40 + "}", "levels of nesting"),
        ("arguments", "[" * 90_000 + "]" * 90_000, "levels of nesting"),
        ("arguments", "[" + "[]," * 150_000 + "[]]", "objects and lists"),
        ("command", '"stop", "strange' + "y" * 100_000 + '": 1', "Command: unknown field"),
        ("replica", '"' + "x" * 100_000 + '"', "Command.replica: expected int"),
    ],
)
def test_a_wrong_field_is_named_in_a_short_message(field: str, text: str, where: str) -> None:
    with pytest.raises(BadRecord, match=where) as caught:
        Command.from_bytes(body(**{field: text}))
    assert len(str(caught.value)) < 400


def test_the_last_of_duplicate_keys_counts() -> None:
    assert Command.from_bytes(body().replace(b'"n": 1', b'"n": 1, "n": 2')).n == 2


def test_raw_bytes_are_refused() -> None:
    for data in (b"", b"\x00" * 9, b"\xff\xfe{", b"\x80", b'"\xed\xa0\x80"', b"[" * 10**6):
        with pytest.raises(BadRecord):
            Command.from_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": 3},
        {"name": None},
        {"name": "\ud800"},
        {"name": "a\x00b"},
        {"workload": []},
        {"settings": {"sync_every": math.inf}},
        {"settings": {"sync_every": math.nan}},
        {"settings": {"sync_every": 10**400}},
        {"settings": []},
        {"code": {}},
        {"protocol": "x" * 10**6},
        {"format": "x" * 10**6},
        {"fingerprint": "x" * 10**6},
    ],
)
def test_an_invalid_group_document_error_names_the_field(change: dict[str, object]) -> None:
    document = GroupDocument(
        run_id="x", name="a", settings=GroupSettings(), workload={"kind": "spirals"}
    )
    data = json.dumps({**json.loads(document.to_bytes()), **change}).encode()
    with pytest.raises(ValueError, match=r"group\.json|sync_every|settings") as caught:
        GroupDocument.from_bytes(data)
    assert len(str(caught.value)) < 600


def test_a_deeply_nested_group_document_is_refused() -> None:
    with pytest.raises(SettingsError, match="nesting"):
        GroupDocument.from_bytes(b'{"a":' * 99_000)


def test_messages_about_any_value_are_short() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, list(range(10**5)), {"a" * 10**5: 1}, 10**4000, None):
        assert len(abridged(value)) <= 200


def test_depth_is_measured_without_recursion() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ValueError, match="here: expected at most 32 levels"):
        check_depth(deep, "here")
    check_depth(parse_json("[" * 32 + "]" * 32), "here")
