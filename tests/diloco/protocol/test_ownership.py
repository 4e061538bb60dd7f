"""Ownership of a prefix: the marker, and the objects that a prefix can hold before it exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.protocol import keys
from diloco.protocol.ownership import (
    MARKER_BYTES,
    PrefixTaken,
    check_empty,
    claim,
    mark,
    owner_of,
)
from diloco.store.base import LocalStore, Store
from diloco.store.open import open_store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    return open_store(f"{request.getfixturevalue('s3_uri')}/ownership")


@pytest.fixture(autouse=True)
def empty(store: Store) -> None:
    store.delete([info.key for info in store.list("")])


def test_a_run_claims_an_empty_prefix_repeatedly(store: Store) -> None:
    assert owner_of(store) is None
    claim(store, "mine")
    assert owner_of(store) == "mine"
    store.put("telemetry/anything", b"x")
    claim(store, "mine")
    for act in (claim, mark):
        with pytest.raises(PrefixTaken, match=r"owner\.json of run mine"):
            act(store, "other")
    assert owner_of(store) == "mine"


def test_the_error_names_objects_of_a_taken_prefix(store: Store) -> None:
    for n in range(7):
        store.put(f"code/{n}.py", b"x")
    with pytest.raises(PrefixTaken, match=r"found 'code/0\.py', .* and 2 more in "):
        claim(store, "mine")
    assert owner_of(store) is None


def test_objects_of_an_interrupted_preflight_are_removed(store: Store) -> None:
    store.put(keys.preflight("0123456789abcdef", "parts"), b"x")
    check_empty(store)
    assert len(store.list("")) == 1
    check_empty(store, sweep=True)
    assert store.list("") == []
    store.put("preflight/notes", b"x")
    with pytest.raises(PrefixTaken, match="preflight/notes"):
        check_empty(store)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"v":3,"run_id":1}', bytes(MARKER_BYTES + 1)]
)
def test_an_invalid_marker_is_refused(store: Store, body: bytes) -> None:
    store.put(keys.OWNER, body)
    with pytest.raises(PrefixTaken, match="is not the marker of a run"):
        claim(store, "mine")


def test_a_marker_of_protocol_2_is_read_so_that_its_run_can_be_deleted(store: Store) -> None:
    store.put(keys.OWNER, b'{"v":2,"run_id":"old"}')
    assert owner_of(store) == "old"


def test_one_of_two_concurrent_claims_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run listed the prefix before the marker existed."""
    looks = 0
    client = type(getattr(store, "inner", store))
    real = client.get_range

    def get_range(self: Store, key: str, start: int, length: int) -> bytes:
        nonlocal looks
        looks += 1
        if looks == 2:
            real_create(keys.OWNER, b'{"v":%d,"run_id":"quicker"}' % _version())
        return real(self, key, start, length)

    real_create = store.create
    monkeypatch.setattr(client, "get_range", get_range)
    with pytest.raises(PrefixTaken, match="of run quicker"):
        claim(store, "slower")


def _version() -> int:
    from diloco.protocol.group_document import PROTOCOL

    return PROTOCOL
