"""Retries: pauses, deadline, and errors that are not retried."""

from __future__ import annotations

import builtins
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from diloco.exit_codes import EX_CONFIG, EX_TEMPFAIL, exit_code_of
from diloco.store.base import (
    LISTED,
    Data,
    LocalStore,
    MakeParts,
    MissingKey,
    ObjectInfo,
    StoreDenied,
    StoreUnavailable,
)
from diloco.store.retry import LONGEST_PAUSE_S, RUN_HAS_TRAINED, RetryingStore
from tests.diloco.clocks import ManualClock


class Down(LocalStore):
    """Fails the next ``failures`` requests with StoreUnavailable."""

    def __init__(self, root: Path, failures: int) -> None:
        super().__init__(root)
        self.failures = failures
        self.tries = 0

    def _try(self) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise StoreUnavailable("503")

    def put(self, key: str, data: Data) -> None:
        self._try()
        super().put(key, data)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        next(iter(make_parts()))
        self._try()
        super().put_stream(key, make_parts, size_bytes=size_bytes)


class Denying(LocalStore):
    """Denies the kinds of operation in ``denied`` while ``clock`` is within its window."""

    def __init__(self, root: Path, *, denied: set[str]) -> None:
        super().__init__(root)
        self.denied = denied
        self.clock: ManualClock | None = None
        self.from_s, self.until_s = 0.0, float("inf")

    def _check(self, kind: str) -> None:
        now_s = self.clock.now_s if self.clock else 0.0
        if kind in self.denied and self.from_s <= now_s < self.until_s:
            raise StoreDenied("403 AccessDenied")

    def put(self, key: str, data: Data) -> None:
        self._check("write")
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._check("write")
        return super().create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self._check("write")
        super().delete(keys)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._check("read")
        return super().get(key, limit=limit)

    def list(self, prefix: str, *, limit: int = LISTED) -> builtins.list[ObjectInfo]:
        self._check("list")
        return super().list(prefix, limit=limit)


def retrying(store: LocalStore, *, seed: int = 0) -> tuple[RetryingStore, ManualClock]:
    clock = ManualClock()
    return RetryingStore(store, clock=clock, rng=random.Random(seed), deadline_s=60), clock


def test_pauses_grow_with_jitter_and_end_at_the_deadline(tmp_path: Path) -> None:
    firsts = set()
    for seed in range(5):
        store, clock = retrying(Down(tmp_path, 10**6), seed=seed)
        with pytest.raises(StoreUnavailable, match="503"):
            store.put("a", b"")
        assert clock.now_s == pytest.approx(60)
        assert clock.pauses[4] > clock.pauses[0]
        assert max(clock.pauses) <= 1.5 * LONGEST_PAUSE_S
        firsts.add(clock.pauses[0])
    assert len(firsts) == 5


def test_the_last_attempt_is_made_at_the_deadline(tmp_path: Path) -> None:
    away = Down(tmp_path, 10**6)
    store, clock = retrying(away)
    with pytest.raises(StoreUnavailable):
        store.put("a", b"1")
    back = Down(tmp_path, away.tries - 1)
    store, clock = retrying(back)
    store.put("a", b"1")
    assert clock.now_s == pytest.approx(60)


def test_each_attempt_of_a_stream_calls_make_parts(tmp_path: Path) -> None:
    made = 0

    def parts() -> Iterator[bytes]:
        nonlocal made
        made += 1
        yield b"1"
        yield b"2"

    store, _ = retrying(Down(tmp_path, 3))
    store.put_stream("a", parts)
    assert store.get("a") == b"12"
    assert made == 4 + 1  # of each attempt, and of the stored one


class SlowUploads(LocalStore):
    """Takes 20 s for each part of a stream; the next ``failures`` streams fail after two."""

    def __init__(self, root: Path, failures: int) -> None:
        super().__init__(root)
        self.clock = ManualClock()
        self.failures = failures
        self.uploads = 0

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        self.uploads += 1
        fails = self.uploads <= self.failures

        def parts() -> Iterator[Data]:
            for count, part in enumerate(make_parts(), start=1):
                self.clock.now_s += 20.0
                if fails and count > 2:
                    raise StoreUnavailable("503")
                yield part

        super().put_stream(key, parts)


def slow_uploads(root: Path, failures: int) -> tuple[SlowUploads, RetryingStore]:
    slow = SlowUploads(root, failures)
    store = RetryingStore(slow, clock=slow.clock, rng=random.Random(0), deadline_s=30.0)
    return slow, store


def test_an_upload_that_takes_longer_than_the_deadline_is_retried(tmp_path: Path) -> None:
    """The deadline counts from its last part."""
    slow, store = slow_uploads(tmp_path, 1)
    store.put_stream("a", lambda: [b"x"] * 6)
    assert store.get("a") == b"x" * 6
    assert slow.uploads == 2


def test_an_upload_that_comes_no_further_is_given_up(tmp_path: Path) -> None:
    slow, store = slow_uploads(tmp_path, 1000)
    with pytest.raises(StoreUnavailable, match="503"):
        store.put_stream("a", lambda: [b"x"] * 6)
    assert slow.uploads == 2, "the second attempt has reached no part that is new"


def test_an_error_of_the_parts_iterator_is_not_retried(tmp_path: Path) -> None:
    def parts() -> Iterable[bytes]:
        raise RuntimeError("bug")

    store, clock = retrying(LocalStore(tmp_path))
    with pytest.raises(RuntimeError, match="bug"):
        store.put_stream("a", parts)
    assert clock.pauses == []


EVERY_KIND = {"read", "list", "write"}


def denying(tmp_path: Path, *, denied: set[str]) -> tuple[Denying, RetryingStore, ManualClock]:
    inner = Denying(tmp_path, denied=denied)
    store, clock = retrying(inner)
    inner.clock = clock
    return inner, store, clock


def test_a_denial_of_the_first_operation_is_raised_at_once(tmp_path: Path) -> None:
    _, store, clock = denying(tmp_path, denied=EVERY_KIND)
    for operation in (
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.put("a", b"1"),
        lambda: store.create("a", b"1"),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreDenied, match="403"):
            operation()
    assert clock.pauses == []


def test_permissions_are_tracked_per_kind_of_operation(tmp_path: Path) -> None:
    """A credential that permits reads but not writes fails at the start."""
    _, store, clock = denying(tmp_path, denied={"write", "list"})
    with pytest.raises(MissingKey):
        store.get("a")
    with pytest.raises(StoreDenied):
        store.put("a", b"1")
    with pytest.raises(StoreDenied):
        store.list("")
    assert clock.pauses == []


def test_a_temporary_denial_is_retried(tmp_path: Path) -> None:
    inner, store, clock = denying(tmp_path, denied=EVERY_KIND)
    inner.from_s, inner.until_s = 1.0, 16.0
    store.put("a", b"1")
    with pytest.raises(MissingKey):
        store.get("b")
    store.list("")
    for operation in (
        lambda: store.put("a", b"2"),
        lambda: store.create("c", b"2"),
        lambda: store.delete(["c"]),
        lambda: store.get("a"),
        lambda: store.list(""),
    ):
        clock.now_s = 1.0
        operation()
        assert 16 <= clock.now_s < 1 + 60
    assert store.get("a") == b"2"


def test_a_lasting_denial_ends_the_process_as_unavailable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner, store, clock = denying(tmp_path, denied=EVERY_KIND)

    def train() -> int:
        store.put("a", b"2")
        return 0

    assert exit_code_of(train) == EX_CONFIG, "denied from the start"
    inner.denied = set()
    assert exit_code_of(train) == 0
    inner.denied = EVERY_KIND
    assert exit_code_of(train) == EX_TEMPFAIL
    assert clock.now_s == pytest.approx(60)
    assert "put a: denied for 60 s, though it was permitted before: 403" in capsys.readouterr().err


def test_a_denial_at_the_start_is_an_outage_if_the_run_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_HAS_TRAINED, "1")
    inner, store, clock = denying(tmp_path, denied=EVERY_KIND)
    assert exit_code_of(lambda: store.put("a", b"2") or 0) == EX_TEMPFAIL
    assert clock.now_s == pytest.approx(60)

    def without_patience() -> int:
        inner.put("a", b"2")
        return 0

    assert exit_code_of(without_patience) == EX_TEMPFAIL
    inner.until_s = 80.0
    store.put("a", b"2")
    assert store.get("a") == b"2"
    monkeypatch.delenv(RUN_HAS_TRAINED)
    inner.until_s = float("inf")
    assert exit_code_of(without_patience) == EX_CONFIG
