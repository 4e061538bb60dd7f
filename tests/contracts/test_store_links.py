"""A folder that other users can write to: links, FIFOs and devices are no objects.

No operation reads, writes, lists or deletes a file outside the folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import BadRecord, Command
from diloco.store import folders
from diloco.store.base import (
    LocalStore,
    NotAnObject,
    ObjectInfo,
    StoreDenied,
    StoreError,
    first_objects,
)
from diloco.store.retry import RetryingStore
from tests.diloco.store.test_retry import ManualClock

SECRET = b"of the server"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    (folder / "key").write_bytes(SECRET)
    (folder / "deep" / "key").write_bytes(SECRET)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


def untouched(outside: Path) -> bool:
    names = sorted(path.name for path in outside.rglob("*"))
    return names == ["deep", "key", "key"] and (outside / "key").read_bytes() == SECRET


ACTS: dict[str, Callable[[LocalStore, str], Any]] = {
    "get": lambda store, key: store.get(key),
    "get_range": lambda store, key: store.get_range(key, 0, 5),
    "put": lambda store, key: store.put(key, b"x"),
    "put_stream": lambda store, key: store.put_stream(key, lambda: [b"x"]),
    "create": lambda store, key: store.create(key, b"x"),
    "delete": lambda store, key: store.delete([key]),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_links_in_a_key_are_not_followed(
    store: LocalStore, root: Path, outside: Path, act: str, depth: int
) -> None:
    link = root.joinpath(*["a"] * depth, "link")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    prefix = "a/" * depth
    for key in (f"{prefix}link/key", f"{prefix}link/deep/key"):
        with pytest.raises(StoreDenied):
            ACTS[act](store, key)
    assert untouched(outside)
    assert store.list("") == store.list(f"{prefix}link/") == []


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="checks the last path component only")
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("replaced", ["team", "team/run"])
def test_parent_folder_replaced_by_a_link_is_not_followed(
    tmp_path: Path, outside: Path, act: str, replaced: str
) -> None:
    root = tmp_path / "team" / "run"
    root.mkdir(parents=True)
    (outside / "run").mkdir()
    (outside / "run" / "key").write_bytes(SECRET)
    (outside / "run" / "key").chmod(0o400)
    store = LocalStore(root)
    store.put("key", b"own")
    (tmp_path / replaced).rename(tmp_path / "moved")
    (tmp_path / replaced).symlink_to(outside / replaced.removeprefix("team").strip("/"))
    with pytest.raises(StoreDenied):
        ACTS[act](store, "key")
    assert (outside / "run" / "key").read_bytes() == SECRET
    assert store.list("") == []


@pytest.mark.parametrize("target", ["{outside}/key", "../outside/key", "/dev/zero", "nowhere"])
def test_link_is_no_object(store: LocalStore, root: Path, outside: Path, target: str) -> None:
    (root / "a").symlink_to(target.format(outside=outside))
    for act in ("get", "get_range"):
        with pytest.raises(StoreDenied):
            ACTS[act](store, "a")
    assert store.list("") == []
    assert store.create("a", b"x") is False
    store.put("a", b"new")  # replaces the link
    assert (store.get("a"), (root / "a").is_symlink()) == (b"new", False)
    (root / "b").symlink_to(outside / "key")
    store.delete(["b"])
    assert not os.path.lexists(root / "b")
    assert untouched(outside)


def test_special_files_are_not_read(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(root / "fifo")
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        (root / "folder").mkdir()
        for key in ("fifo", "socket", "folder"):
            for act in ("get", "get_range"):
                with pytest.raises(StoreDenied):
                    ACTS[act](store, key)
    assert store.list("") == []


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": lambda path: os.mknod(path, 0o600 | stat.S_IFSOCK),
    "folder": lambda path: (path / "deep").mkdir(parents=True),
    "link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_special_file_is_named_by_readers_and_replaced_by_writers(
    store: LocalStore, root: Path, kind: str
) -> None:
    clock = ManualClock()
    patient = RetryingStore(store, clock=clock, rng=random.Random(0), deadline_s=60.0)
    patient.permitted |= {"read", "write"}
    key = keys.control(1)
    (root / "control").mkdir()
    ODD[kind](root / key)
    for reader in (store, patient):
        with pytest.raises(NotAnObject, match=key):
            reader.get(key)
        with pytest.raises(BadRecord, match=key):
            Command.read(reader, key)
        with pytest.raises(Damaged, match=key):
            read_record(reader, key, Command)
        assert reader.create(key, b"x") is False
    assert patient.get_range(key, 0, 1) == b""
    assert clock.now_s == 0.0, "no retries"
    store.put(key, b"new")
    assert store.get(key) == b"new"


@pytest.mark.parametrize("kind", ["fifo", "socket", "file"])
@pytest.mark.parametrize("act", ["put", "put_stream", "create"])
def test_writers_move_a_file_in_place_of_a_folder_aside(
    store: LocalStore, root: Path, act: str, kind: str
) -> None:
    path = root / "control"
    path.write_bytes(b"x") if kind == "file" else ODD[kind](path)
    ACTS[act](store, "control/00000001.json")
    assert store.get("control/00000001.json") == b"x"
    assert len(list(root.glob(".control.*.odd"))) == 1


def test_folder_replaced_by_a_link_between_two_steps_is_not_followed(
    store: LocalStore, root: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each ``open``, one folder of the path is replaced by a link."""
    real = os.open
    for act in ACTS:
        for step in range(1, 5):
            for path in root.iterdir():
                path.unlink() if path.is_symlink() else _remove_tree(path)
            (root / "a" / "deep").mkdir(parents=True)
            (root / "a" / "deep" / "key").write_bytes(b"own")
            calls = 0

            def swapping(*args: Any, step: int = step, **kwargs: Any) -> int:
                nonlocal calls
                calls += 1
                if calls == step:
                    (root / "a").rename(root / f"away{step}")
                    (root / "a").symlink_to(outside)
                return real(*args, **kwargs)

            with monkeypatch.context() as patched:
                patched.setattr(folders.os, "open", swapping)
                try:
                    result = ACTS[act](store, "a/deep/key")
                except StoreError:
                    result = None
            assert SECRET not in (result if isinstance(result, bytes) else b"")
            assert SECRET[:5] != result
            assert untouched(outside), (act, step)


def _remove_tree(path: Path) -> None:
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.rmdir() if inner.is_dir() else inner.unlink()
    path.rmdir()


def test_root_can_be_a_link_only_when_it_is_opened(
    tmp_path: Path, root: Path, outside: Path
) -> None:
    (tmp_path / "alias").symlink_to(root)
    store = LocalStore(tmp_path / "alias")
    store.put("a", b"x")
    assert (root / "a").read_bytes() == b"x"
    assert store.uri == root.as_uri()
    root.rename(tmp_path / "moved")
    root.symlink_to(outside)
    for act in ACTS:
        with pytest.raises(StoreDenied):
            ACTS[act](store, "key")
    assert untouched(outside)


def test_object_with_a_hard_link_is_an_object(store: LocalStore, root: Path) -> None:
    """The folder of a run can be backed up with hard links."""
    store.put("a", b"x")
    (root / "backup").hardlink_to(root / "a")
    store.put("a", b"y")
    assert (store.get("a"), (root / "backup").read_bytes()) == (b"y", b"x")


def test_listing_omits_folders_that_are_too_deep(store: LocalStore, root: Path) -> None:
    deep = root.joinpath(*["d"] * 60)
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"x")
    store.put("a/b", b"x")
    assert store.list("") == [ObjectInfo("a/b", 1)]


def test_deletion_removes_empty_folders(store: LocalStore, root: Path) -> None:
    for key in ("a/b/c", "a/b/d", "a/e/f", "g/h"):
        store.put(key, b"x")
    store.delete(["a/b/c", "g/h", "not/there"])
    assert sorted(path.name for path in root.iterdir()) == ["a"]
    assert (root / "a" / "b" / "d").exists()
    store.delete(["a/b/d", "a/e/f"])
    assert [*root.iterdir()] == []


def test_write_survives_concurrent_removal_of_its_folder(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = os.open, 0

    def removing(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        nonlocal removed
        if flags & os.O_CREAT and removed < 3:
            removed += 1
            (root / "a").rmdir()
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(folders.os, "open", removing)
    store.put("a/b", b"x")
    assert (store.get("a/b"), removed) == (b"x", 3)


def test_first_objects_are_listed(store: LocalStore) -> None:
    assert first_objects(store, 2) == []
    for n in range(5):
        store.put(f"n/{n}", b"x")
    assert len(first_objects(store, 2)) == 2
    assert len(first_objects(store, 10)) == 5


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open(tmp_path: Path) -> Iterator[None]:
    yield
    descriptors = Path("/proc/self/fd")
    targets = []
    for descriptor in descriptors.iterdir() if descriptors.exists() else ():
        with contextlib.suppress(OSError):  # another thread has closed it
            targets.append(os.readlink(descriptor))
    assert not [target for target in targets if target.startswith(str(tmp_path))]
