"""A store without an atomic create refuses it, except to the designated coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.store.base import StoreDenied
from diloco.store.fsspec import FsspecStore
from diloco.store.open import open_store


def test_create_is_refused(hub_uri: str) -> None:
    store = open_store(hub_uri)
    assert not store.atomic_create
    with pytest.raises(StoreDenied, match=r"atomic create .* found hf; .* coordinator"):
        store.create("plan.json", b"mine")
    assert store.list("") == []


def test_coordinator_creates_once(hub_uri: str) -> None:
    coordinator = open_store(hub_uri, coordinator=True)
    assert not coordinator.atomic_create
    assert coordinator.create("plan.json", b"first") is True
    assert coordinator.create("plan.json", b"second") is False
    assert open_store(hub_uri).get("plan.json") == b"first"


def test_local_files_of_fsspec_have_no_atomic_create(tmp_path: Path) -> None:
    with pytest.raises(StoreDenied, match="atomic create"):
        FsspecStore(f"file://{tmp_path}").create("a", b"")


def test_coordinator_uses_atomic_create_where_available(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), coordinator=True)
    assert store.atomic_create
    assert (store.create("a", b"1"), store.create("a", b"2")) == (True, False)
