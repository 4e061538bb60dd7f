"""A strongly consistent bucket in memory, and each process's faulty view of it.

The bucket keeps the first bytes written under every key of the log (``written``), so that the
oracle can replay rounds whose payloads were damaged or deleted.
"""

from __future__ import annotations

import builtins
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco.store.base import (
    LISTED,
    Data,
    MakeParts,
    MissingKey,
    ObjectInfo,
    Pages,
    StoreDenied,
    StoreUnavailable,
    check_size,
)
from tests.diloco.model.virtual_time import Killed, Process, Scheduler

T = TypeVar("T")


class Bucket:
    """The objects, without faults."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.network = Process("network")
        """Owns writes that are on their way; it outlives every other process."""
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, bytes] = {}
        self.written_s: dict[str, float] = {}
        self.past: builtins.list[tuple[float, dict[str, int]]] = []
        self.commits = 0
        self.keeps_past = True
        self.ever_damaged: set[str] = set()
        self.damaged: dict[str, str] = {}
        """Keys whose stored bytes were damaged permanently, with the kind of damage."""

    def put(self, key: str, data: bytes) -> None:
        self._remember()
        self.commits += key.endswith("/commit.json") and key not in self.written
        self.objects[key] = data
        self.written[key] = data
        self.written_s[key] = self.scheduler.now_s
        self.damaged.pop(key, None)

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.put(key, data)
        return True

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise MissingKey(key) from None

    def delete(self, names: Iterable[str]) -> None:
        self._remember()
        for key in names:
            self.objects.pop(key, None)
            self.damaged.pop(key, None)

    def list(self, prefix: str, *, before_s: float = 0.0) -> builtins.list[ObjectInfo]:
        """Return the listing of ``before_s`` seconds ago, as far as it is recorded."""
        sizes = {key: len(data) for key, data in self.objects.items()}
        if before_s:
            then_s = self.scheduler.now_s - before_s
            for seen_s, past in reversed(self.past):
                sizes = past
                if seen_s <= then_s:
                    break
        return [ObjectInfo(key, sizes[key]) for key in sorted(sizes) if key.startswith(prefix)]

    def damage(self, key: str, how: str, data: bytes) -> None:
        """Damage the stored object permanently."""
        self.objects[key] = data
        self.damaged[key] = how
        self.ever_damaged.add(key)

    def _remember(self) -> None:
        """Record the state for stale listings; a few seconds are kept."""
        if not self.keeps_past:
            return
        now_s = self.scheduler.now_s
        self.past.append((now_s, {key: len(data) for key, data in self.objects.items()}))
        del self.past[:-40]


@dataclass(frozen=True, kw_only=True)
class Chances:
    """Probability of each fault per operation that can have it; none by default."""

    kill: float = 0.0
    drop: float = 0.0
    lose: float = 0.0
    late: float = 0.0
    stale: float = 0.0
    garble: float = 0.0
    rot: float = 0.0
    decay: float = 0.0
    record: float = 0.0
    slow: float = 0.0
    deny: float = 0.0
    slow_s: float = 20.0
    late_s: float = 90.0


PERMANENT = (".bin", ".safetensors", "/reduced/", "contributions/", "packs/")
"""Objects that other objects can replace, and packs, which no replica needs: these are also damaged
for good."""


RECORDS = ("/plan.json", "/commit.json", "/manifest.json", "contributions/")
"""Records that replicas write again; ``group.json`` is not among them, as nothing replaces it."""
LIST_LAG_S = 10.0
"""How old a stale listing is, at most."""


class FaultyView:
    """A :class:`~diloco.store.base.Store` for one process."""

    uri = "memory://model"

    def __init__(
        self,
        bucket: Bucket,
        process: Process,
        rng: random.Random,
        counts: Counter[str],
        chances: Callable[[], Chances],
    ) -> None:
        self.atomic_create = True
        self._bucket = bucket
        self._process = process
        self._rng = rng
        self._counts = counts
        self._chances = chances
        self._scheduler = bucket.scheduler

    # -- the store -------------------------------------------------------------------------------

    def put(self, key: str, data: Data) -> None:
        sent = bytes(data)
        self._write(f"put {key}", lambda: self._store(key, sent))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        sent = b"".join(bytes(part) for part in make_parts())
        self._write(f"put {key}", lambda: self._store(key, sent))

    def create(self, key: str, data: Data) -> bool:
        sent = bytes(data)
        return self._write(f"create {key}", lambda: self._store(key, sent, create=True))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        data = self._read(key, self._request(f"get {key}", lambda: self._bucket.get(key)))
        return data if limit is None else check_size(key, data, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._request(f"get {key}", lambda: self._bucket.get(key))
        return self._read(key, data[start : start + length])

    def list(self, prefix: str, *, limit: int = LISTED) -> builtins.list[ObjectInfo]:
        before_s = self._rng.uniform(0, LIST_LAG_S) if self._strikes("stale") else 0.0
        return self._request(f"list {prefix}", lambda: self._bucket.list(prefix, before_s=before_s))

    def list_pages(self, prefix: str) -> Pages:
        yield self.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._request("delete", lambda: self._bucket.delete(names))

    # -- its faults ------------------------------------------------------------------------------

    def _strikes(self, fault: str) -> bool:
        chance: float = getattr(self._chances(), fault)
        if not chance or self._rng.random() >= chance:
            return False
        self._counts[fault] += 1
        return True

    def _pass_time(self) -> None:
        """Let a request take some time, during which its process can be killed."""
        self._counts["operations"] += 1
        slow_s = self._chances().slow_s if self._strikes("slow") else 0.0
        self._scheduler.sleep(self._rng.uniform(0.005, 0.1) + self._rng.uniform(0, slow_s))
        if self._strikes("kill"):
            self._scheduler.kill(self._process)
            raise Killed

    def _request(self, what: str, operation: Callable[[], T]) -> T:
        self._pass_time()
        if self._strikes("deny"):
            raise StoreDenied(f"{what}: denied")
        if self._strikes("drop"):
            raise StoreUnavailable(f"{what}: dropped")
        answer = operation()
        if self._strikes("lose"):
            raise StoreUnavailable(f"{what}: the response was lost")
        self._scheduler.sleep(0.001)
        if self._strikes("kill"):
            self._scheduler.kill(self._process)
            raise Killed
        return answer

    def _write(self, what: str, operation: Callable[[], T]) -> T:
        if self._strikes("late"):
            delay_s = self._rng.uniform(1, self._chances().late_s)
            late = _after(self._scheduler, delay_s, operation)
            self._scheduler.spawn(f"late {what}", late, self._bucket.network)
            self._pass_time()
            raise StoreUnavailable(f"{what}: no response yet")
        return self._request(what, operation)

    def _store(self, key: str, data: bytes, *, create: bool = False) -> bool:
        if create and not self._bucket.create(key, data):
            return False
        if not create:
            self._bucket.put(key, data)
        self._spoil(key, data)
        return True

    def _spoil(self, key: str, data: bytes) -> None:
        if data and any(part in key for part in PERMANENT):
            if self._strikes("rot"):
                self._damage(key)
            if self._strikes("decay"):
                self._damage_later(key)
        is_record = key.endswith(".json") and any(part in key for part in RECORDS)
        if is_record and not key.startswith("final/") and self._strikes("record"):
            self._damage_later(key)

    def _damage_later(self, key: str) -> None:
        decay = _after(self._scheduler, self._rng.uniform(0, 20), lambda: self._damage(key))
        self._scheduler.spawn(f"decay of {key}", decay, self._bucket.network)

    def _damage(self, key: str) -> None:
        """Damage the object under ``key`` permanently."""
        if data := self._bucket.objects.get(key):
            how, damaged = _damaged(data, self._rng, self._bucket, key)
            self._bucket.damage(key, how, damaged)

    def _read(self, key: str, data: bytes) -> bytes:
        if data and self._strikes("garble"):
            return _damaged(data, self._rng, self._bucket, key)[1]
        return data


def _after(scheduler: Scheduler, delay_s: float, operation: Callable[[], Any]) -> Callable[[], Any]:
    def work() -> None:
        scheduler.sleep(delay_s)
        operation()

    return work


def _damaged(data: bytes, rng: random.Random, bucket: Bucket, key: str) -> tuple[str, bytes]:
    """Return ``data`` with a flipped bit, truncated, or replaced by another key's bytes."""
    how = rng.choice(("flip", "flip", "cut", "other"))
    if how == "cut":
        return how, data[: rng.randrange(len(data))]
    if how == "other":
        ending = key.rsplit(".", 1)[-1]
        others = [k for k in bucket.objects if k != key and k.endswith(ending)]
        if others:
            other = bucket.objects[rng.choice(sorted(others))]
            if other != data:
                return how, other
    spot = rng.randrange(len(data))
    return "flip", data[:spot] + bytes([data[spot] ^ (1 << rng.randrange(8))]) + data[spot + 1 :]
