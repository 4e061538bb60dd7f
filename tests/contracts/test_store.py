"""The contract of ``diloco/store/base.py``, tested with every store."""

from __future__ import annotations

import gc
import hashlib
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.clock import SystemClock
from diloco.store.base import (
    PART_BYTES,
    ListingTooLong,
    LocalStore,
    MissingKey,
    ObjectInfo,
    ObjectTooLarge,
    Store,
    StoreDenied,
    StoreUnavailable,
)
from diloco.store.fsspec import FsspecStore
from diloco.store.metered import MeteredStore
from diloco.store.open import open_store
from diloco.store.remote import PerProcessStore
from diloco.store.retry import RetryingStore
from tests.diloco.faulty_store import Faults, FaultyStore
from tests.matrix import slow_except

MakeStore = Callable[[], Store]


URIS = {"s3": "s3_uri", "s3fs": "s3_uri", "gs": "gcs_uri", "az": "azure_uri", "hf": "hub_uri"}
FAST = ("local", "memory", "s3")
"""The stores of ``make test``; the others differ by their client or emulator."""


def _maker(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return a function that opens a new client on one new prefix."""
    name = uuid.uuid4().hex
    if request.param == "local":
        uri = str(tmp_path / "bucket")
    elif request.param == "memory":
        uri = f"memory://{name}/run"
    else:
        uri = f"{request.getfixturevalue(URIS[request.param])}/{name}"
    if request.param == "s3fs":
        return lambda: PerProcessStore(lambda: FsspecStore(uri))
    return lambda: open_store(uri)


@pytest.fixture(params=slow_except(FAST, ["local", "memory", *URIS]))
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    return _maker(request, tmp_path)


@pytest.fixture(
    params=slow_except(FAST, ["local", "memory", *(name for name in URIS if name != "hf")])
)
def make_creator(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Stores with an atomic create; for hf see test_store_without_create.py."""
    return _maker(request, tmp_path)


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()


def test_get_returns_the_last_put(store: Store) -> None:
    store.put("a/b.bin", b"one")
    store.put("a/b.bin", memoryview(b"two!"))
    store.put("empty", b"")
    assert store.get("a/b.bin") == b"two!"
    assert store.get("empty") == b""


def test_a_range_is_a_slice(store: Store) -> None:
    store.put("r", bytes(range(100)))
    assert store.get_range("r", 10, 5) == bytes(range(10, 15))


def test_range_is_cut_at_the_end_of_the_object(store: Store) -> None:
    store.put("r", bytes(range(100)))
    store.put("empty", b"")
    assert store.get_range("r", 98, 5) == bytes([98, 99])
    assert store.get_range("r", 100, 5) == b""
    assert store.get_range("empty", 0, 5) == b""


def test_stream_is_stored_as_one_object(store: Store) -> None:
    parts = [bytes([index]) * PART_BYTES for index in range(2)] + [b"the end"]
    store.put_stream("big", lambda: iter(parts))
    assert store.get("big") == b"".join(parts)
    assert store.get_range("big", PART_BYTES - 1, 3) == b"\0\1\1"
    assert [info.size_bytes for info in store.list("")] == [2 * PART_BYTES + 7]
    store.put_stream("big", lambda: [memoryview(b"short")])
    store.put_stream("empty", list)
    assert (store.get("big"), store.get("empty")) == (b"short", b"")


@pytest.mark.parametrize("before", [0, 1, 2])
def test_failed_stream_leaves_no_object(store: Store, before: int) -> None:
    class Stop(BaseException):
        pass

    def parts() -> Iterator[bytes]:
        for _ in range(before):
            yield bytes(PART_BYTES)
            assert store.list("") == [ObjectInfo("old", 3)]
        raise failure

    store.put("old", b"old")
    failures = (MissingKey("a part"), StoreUnavailable("503"), RuntimeError("bug"), Stop())
    for number, failure in enumerate(failures):
        # One part or two: every failure for both keys, but not twice.
        keys = [("old", "new")[(number + before) % 2]] if before else ["old", "new"]
        for key in keys:
            with pytest.raises(type(failure)) as caught:
                store.put_stream(key, parts)
            assert caught.value is failure
    gc.collect()
    assert store.list("") == [ObjectInfo("old", 3)]
    assert store.get("old") == b"old"


def test_missing_key_raises(store: Store) -> None:
    with pytest.raises(MissingKey):
        store.get("no/such")
    with pytest.raises(MissingKey):
        store.get_range("no/such", 0, 1)
    store.delete(["no/such"])


def test_listing_is_sorted_and_has_new_objects_of_a_peer(make_store: MakeStore) -> None:
    own, peer = make_store(), make_store()
    assert own.list("x/") == []
    peer.put("x/2", b"22")
    peer.put("x/1/deep", b"1")
    peer.put("xy", b"")
    assert own.list("x/") == [ObjectInfo("x/1/deep", 1), ObjectInfo("x/2", 2)]
    peer.delete(["x/2"])
    assert [info.key for info in own.list("x/")] == ["x/1/deep"]


def test_listing_has_every_completed_write(make_store: MakeStore) -> None:
    own, peer = make_store(), make_store()
    for index in range(5):
        peer.put(f"n/{index}", b"x" * index)
        assert [info.size_bytes for info in own.list("n/")] == [*range(index + 1)]
        assert own.get(f"n/{index}") == b"x" * index


def test_reads_are_not_cached(make_store: MakeStore) -> None:
    own, peer = make_store(), make_store()
    for body in (b"one", b"two, longer", b"3"):
        peer.put("beat", body)
        assert (own.get("beat"), own.get_range("beat", 1, 99)) == (body, body[1:])


@pytest.mark.parametrize(
    "name", ["a b", "a+b", "100%25", "x=1&y", "(a)'!~*", "ä-日本", "a=b,c;d@e:f$"]
)
def test_key_can_have_any_legal_character(store: Store, name: str) -> None:
    key = f"odd {name}/{name}.bin"
    store.put(key, name.encode())
    assert store.get(key) == name.encode()
    assert store.get_range(key, 0, 1) == name.encode()[:1]
    assert [info.key for info in store.list("")] == [key]
    store.delete([key])
    assert store.list("") == []


def test_large_object_is_returned_completely(store: Store) -> None:
    body = random.Random(0).randbytes(20 << 20)
    store.put("big", body)
    assert hashlib.sha256(store.get("big")).digest() == hashlib.sha256(body).digest()
    assert store.get_range("big", 17 << 20, 3) == body[17 << 20 :][:3]


def test_create_never_replaces(make_creator: MakeStore) -> None:
    assert make_creator().create("once.json", b"first") is True
    assert make_creator().create("once.json", b"second") is False
    assert make_creator().get("once.json") == b"first"


def test_one_of_several_concurrent_creates_wins(
    make_creator: MakeStore, request: pytest.FixtureRequest
) -> None:
    make_store = make_creator
    if "memory" in request.node.name:
        make_store = _one_at_a_time(make_creator)
    writers, rounds = 8, 4
    stores = [make_store() for _ in range(writers)]
    for round in range(rounds):
        barrier = threading.Barrier(writers)
        won: list[int] = []

        def write(
            writer: int,
            round: int = round,
            barrier: threading.Barrier = barrier,
            won: list[int] = won,
        ) -> None:
            barrier.wait()
            if stores[writer].create(f"race/{round}", str(writer).encode()):
                won.append(writer)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert stores[0].get(f"race/{round}") == str(won[0]).encode()


def _one_at_a_time(make_store: MakeStore) -> MakeStore:
    """Serialize ``create``: the memory file system of fsspec is not thread-safe."""
    lock = threading.Lock()

    class Locked(MeteredStore):
        def create(self, key: str, data: bytes) -> bool:  # type: ignore[override]
            with lock:
                return super().create(key, data)

    return lambda: Locked(make_store())


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a\\b", "./a", "a?b", "a#b"]
)
def test_key_outside_the_prefix_is_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="relative object key"):
        store.put(key, b"")


def test_unknown_scheme_is_denied() -> None:
    with pytest.raises(StoreDenied, match="nosuch"):
        open_store("nosuch://bucket/run")


def test_wrong_secret_is_denied(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(s3_uri)
    with pytest.raises(StoreDenied):
        store.put("a", b"")
    with pytest.raises(StoreDenied):
        store.create("a", b"")
    with pytest.raises(StoreDenied):
        store.get("a")


def test_unwritable_folder_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreDenied):
        LocalStore(tmp_path / "file" / "run").put("a", b"")


def test_temporary_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".b.0123.tmp").write_bytes(b"half")
    assert LocalStore(tmp_path).list("a/") == []


def test_metered_store_counts_requests_and_bytes(tmp_path: Path) -> None:
    store = MeteredStore(LocalStore(tmp_path))
    store.put("a", b"12345")
    store.create("b", b"123")
    store.get("a")
    store.get_range("a", 0, 2)
    store.list("")
    with pytest.raises(MissingKey):
        store.get("c")
    usage = store.usage
    assert (usage.requests, usage.bytes_up, usage.bytes_down) == (6, 8, 7)
    store.put_stream("d", lambda: [b"12"])
    assert (usage.requests, usage.bytes_up) == (7, 10)
    store.put_stream("d", lambda: [b"12", b"34", b"5"])
    assert (usage.requests, usage.bytes_up) == (12, 15)


def test_limited_read_returns_objects_within_the_limit(store: Store) -> None:
    store.put("r", bytes(range(100)))
    store.put("empty", b"")
    assert store.get("r", limit=100) == bytes(range(100))
    assert store.get("r", limit=10**9) == bytes(range(100))
    assert store.get("empty", limit=0) == b""
    with pytest.raises(MissingKey):
        store.get("none", limit=10)


@pytest.mark.parametrize("limit", [0, 1, 99, -1])
def test_limited_read_refuses_larger_objects(store: Store, limit: int) -> None:
    store.put("r", bytes(100))
    with pytest.raises(ObjectTooLarge, match=f"r: expected at most {limit} bytes"):
        store.get("r", limit=limit)


def test_limited_read_can_be_larger_than_a_part(store: Store) -> None:
    data = bytes(PART_BYTES) + b"end"
    store.put("r", data)
    assert store.get("r", limit=len(data)) == data
    with pytest.raises(ObjectTooLarge):
        store.get("r", limit=len(data) - 1)


def test_wrapped_stores_forward_the_limit(store: Store) -> None:
    store.put("r", bytes(100))
    faulty = FaultyStore(store, rng=random.Random(0), clock=SystemClock(), faults=Faults())
    retrying = RetryingStore(store, clock=SystemClock(), rng=random.Random(0), deadline_s=60.0)
    for wrapped in (MeteredStore(store), PerProcessStore(lambda: store), faulty, retrying):
        assert len(wrapped.get("r", limit=100)) == 100
        with pytest.raises(ObjectTooLarge):
            wrapped.get("r", limit=99)


def test_listing_over_its_limit_is_refused(store: Store) -> None:
    for n in range(3):
        store.put(f"n/{n}", b"x")
    store.put("other/1", b"x")
    assert len(store.list("n/", limit=3)) == 3
    with pytest.raises(ListingTooLong, match="n/: expected at most 2 objects, found more"):
        store.list("n/", limit=2)
    with pytest.raises(ListingTooLong, match="all objects: expected at most 3 objects"):
        store.list("", limit=3)


def test_pages_of_a_listing_are_complete(store: Store) -> None:
    for name in ("n/a/1", "n/a/2", "n/b", "na", "other/1"):
        store.put(name, b"xy")
    paged = [info for page in store.list_pages("n/") for info in page]
    assert sorted(paged, key=lambda info: info.key) == store.list("n/")
    assert [info.key for info in store.list("n/")] == ["n/a/1", "n/a/2", "n/b"]
    assert [info for page in store.list_pages("none/") for info in page] == []


def test_objects_can_be_deleted_during_a_paged_listing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("base", "s3", "fsspec_pages"):
        monkeypatch.setattr(f"diloco.store.{module}.PAGE_OBJECTS", 2)
    for n in range(7):
        store.put(f"n/{n % 2}/{n}", b"x")
    pages = 0
    for page in store.list_pages(""):
        pages += 1
        store.delete(info.key for info in page)
    assert store.list("") == []
    paged = isinstance(store, LocalStore) or store.uri.startswith(("s3:", "gs:", "az:", "abfs"))
    assert pages >= 4 or not paged


def test_wrapped_stores_forward_the_limit_of_a_listing(store: Store) -> None:
    store.put("n/1", b"x")
    store.put("n/2", b"x")
    faulty = FaultyStore(store, rng=random.Random(0), clock=SystemClock(), faults=Faults())
    retrying = RetryingStore(store, clock=SystemClock(), rng=random.Random(0), deadline_s=60.0)
    for wrapped in (MeteredStore(store), PerProcessStore(lambda: store), faulty, retrying):
        assert len(wrapped.list("n/", limit=2)) == 2
        assert [len(page) for page in wrapped.list_pages("n/")] == [2]
        with pytest.raises(ListingTooLong):
            wrapped.list("n/", limit=1)


def test_empty_folders_count_towards_the_limit_of_a_listing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for n in range(20):
        (tmp_path / f"members/{n}/empty").mkdir(parents=True)
    assert store.list("members/") == []
    with pytest.raises(ListingTooLong, match="expected at most 12 folders and temporary files"):
        store.list("members/", limit=3)
