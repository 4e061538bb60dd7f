"""What one process has read of the log, while another thread of it forgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.clock import SystemClock
from diloco.exchange.round_observer import Sight
from diloco.membership.lease import Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol import keys
from diloco.protocol.records import Commit, ContributionRecord, Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, MissingKey

ME = Identity(replica=0, incarnation="00001-00000000")


class Watched:
    """A store with a hook before each get, as if another thread ran just then."""

    atomic_create = True

    def __init__(self, inner: LocalStore) -> None:
        self.inner = inner
        self.hook: Callable[[str], object] = lambda key: None

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.hook(key)
        return self.inner.get(key, limit=limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def record(replica: int) -> ContributionRecord:
    return ContributionRecord(
        round=1, fragment=0, base_round=0, base_digest="", replica=replica,
        incarnation="00001-00000000", model_hash="", codec="fp32", numel=1, tokens=1,
        new_tokens=1, steps=1, loss=0.0, norm=0.0, norms=(0.0,), size_bytes=260, digest="",
        checksums="", compute_s=0.0, encode_s=0.0, wall_s=0.0,
    )  # fmt: skip


def make(tmp_path: Path) -> tuple[Watched, Sight]:
    store = Watched(LocalStore(tmp_path))
    settings = GroupSettings()
    sight = Sight(
        store,  # type: ignore[arg-type]
        ME,
        settings,
        observer=Observer(store, clock=SystemClock(), timeout_s=15.0),  # type: ignore[arg-type]
        model_hash="",
        table=Table(
            [Slot(name="w", shape=(1,), dtype="float32", numel=1)], fragments=1, pattern="strided"
        ),
        committer=lambda: None,
    )
    return store, sight


def seen(sight: Sight) -> list[int]:
    from diloco.exchange.round_observer import Base

    view = sight.before_plan(1, Base(round=0, digest=""), waited_s=0.0, sync_s=0.0)
    return sorted(view.contributions)


def test_records_forgotten_while_they_are_listed_are_still_seen(tmp_path: Path) -> None:
    store, sight = make(tmp_path)
    for replica in range(3):
        key = keys.contribution_record(1, replica, "00001-00000000")
        store.put(key, record(replica).to_bytes())
    store.hook = lambda key: sight.forget_before(5)
    assert seen(sight) == [0, 1, 2]


def test_a_commit_forgotten_while_it_is_read_is_still_returned(tmp_path: Path) -> None:
    store, sight = make(tmp_path)
    commit = Commit(
        round=1, fragment=0, committer=ME, contributors=(ME,), void="", tokens_total=0,
        committed_total=1, wall_s=0.0,
    )  # fmt: skip
    store.put(keys.commit(1), commit.to_bytes())

    class Forgetful(dict[int, Commit]):
        def __setitem__(self, round: int, value: Commit) -> None:
            """Another thread has put a new dict in its place already."""

    sight._commits = Forgetful()
    assert sight.commit_of(1) == commit


def test_a_record_that_is_listed_before_it_can_be_read_is_read_later(tmp_path: Path) -> None:
    store, sight = make(tmp_path)
    key = keys.contribution_record(1, 2, "00001-00000000")
    store.put(key, record(2).to_bytes())

    def not_yet(wanted: str) -> None:
        if wanted == key:
            raise MissingKey(wanted)

    store.hook = not_yet
    assert seen(sight) == []
    store.hook = lambda key: None
    assert seen(sight) == [2]


def test_a_record_that_its_writer_mends_after_many_refusals_is_read(tmp_path: Path) -> None:
    """Two replicas that refuse each other's first upload for ever would never plan a round."""
    store, sight = make(tmp_path)
    key = keys.contribution_record(1, 2, "00001-00000000")
    good = record(2).to_bytes()
    store.put(key, good[:-1])
    reads: list[str] = []
    store.hook = reads.append
    assert [seen(sight) for _ in range(30)] == [[]] * 30
    assert reads.count(key) <= 6, "most lists do not read it again"
    store.put(key, good)
    assert [2] in [seen(sight) for _ in range(10)]
