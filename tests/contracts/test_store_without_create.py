"""A store without an atomic create refuses it, except to the one process named committer."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.store.base import StoreDenied
from diloco.store.fsspec import FsspecStore
from diloco.store.open import open_store


def test_it_is_refused_and_says_so(hub_uri: str) -> None:
    store = open_store(hub_uri)
    assert not store.atomic_create
    with pytest.raises(StoreDenied, match=r"atomic create .* found hf; .* designated committer"):
        store.create("plan.json", b"mine")
    assert store.list("") == []


def test_the_designated_committer_creates_once(hub_uri: str) -> None:
    committer = open_store(hub_uri, sole_creator=True)
    assert not committer.atomic_create
    assert committer.create("plan.json", b"first") is True
    assert committer.create("plan.json", b"second") is False
    assert open_store(hub_uri).get("plan.json") == b"first"


def test_fsspecs_own_local_files_have_none(tmp_path: Path) -> None:
    with pytest.raises(StoreDenied, match="atomic create"):
        FsspecStore(f"file://{tmp_path}").create("a", b"")


def test_where_there_is_one_the_sole_creator_uses_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), sole_creator=True)
    assert store.atomic_create
    assert (store.create("a", b"1"), store.create("a", b"2")) == (True, False)
