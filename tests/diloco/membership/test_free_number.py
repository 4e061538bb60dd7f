"""Replica numbers that are taken from the store."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.clock import Clock
from diloco.errors import ReplicaError
from diloco.membership.free_number import LAST_SEQ, claim_free_number, claim_process
from diloco.membership.lease import Lease, claim_incarnation
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, ObjectInfo
from tests.diloco.clocks import FastClock, ManualClock
from tests.diloco.membership.lease_harness import beat, write

TIMEOUT_S = 15.0
SETTINGS = GroupSettings(num_replicas=2, max_replicas=4, heartbeat_timeout_s=TIMEOUT_S)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def claim(store: LocalStore, clock: Clock | None = None, **options: object) -> Identity:
    return claim_free_number(
        store,
        SETTINGS,
        nonce=secrets.token_hex(4),
        clock=clock or ManualClock(),
        **options,  # type: ignore[arg-type]
    )


def owned(store: LocalStore, replica: int, **fields: object) -> Callable[..., None]:
    """Claim a number and write its lease. Returns a function that writes the next heartbeat."""
    process = claim_incarnation(store, replica, nonce=secrets.token_hex(4))
    count = 0

    def next_beat(**changes: object) -> None:
        nonlocal count
        count += 1
        given = {"incarnation": process.incarnation, "count": count, **fields, **changes}
        write(store, beat(replica=replica, **given))

    next_beat()
    return next_beat


def test_the_first_process_gets_number_0_without_waiting(store: LocalStore) -> None:
    clock = ManualClock()
    assert claim(store, clock) == Identity(
        replica=0, incarnation=keys.incarnation(1, store.get(keys.claim(0, 1)).decode())
    )
    assert clock.pauses == []


def test_the_number_of_a_live_process_is_not_taken(store: LocalStore) -> None:
    next_beat = owned(store, 0)
    clock = ManualClock(meanwhile=next_beat)
    assert claim(store, clock).replica == 1
    assert len(clock.pauses) == 1, "one change of the lease shows that its process is alive"


def test_the_number_of_a_dead_process_is_taken_after_the_timeout(store: LocalStore) -> None:
    owned(store, 0, state="waiting")
    clock = ManualClock()
    taken = claim(store, clock)
    assert taken.replica == 0 and keys.incarnation_seq(taken.incarnation) == 2
    assert clock.now_s == TIMEOUT_S


def test_a_live_process_keeps_its_number_while_another_one_is_dead(store: LocalStore) -> None:
    live = owned(store, 0)
    owned(store, 1)
    clock = ManualClock(meanwhile=live)
    assert claim(store, clock).replica == 1
    assert clock.now_s == TIMEOUT_S


@pytest.mark.parametrize("state", ["left", "failed", "done"])
def test_the_number_of_a_process_that_has_ended_is_taken_at_once(
    store: LocalStore, state: str
) -> None:
    owned(store, 0)
    owned(store, 1, state=state)
    clock = ManualClock()
    assert claim(store, clock).replica == 1
    assert clock.pauses == []


def test_a_calm_process_is_asked_for_a_heartbeat(store: LocalStore) -> None:
    clock = ManualClock()
    process = claim_incarnation(store, 0, nonce="00000000")
    lease = Lease(
        store,
        process,
        clock=clock,
        interval_s=TIMEOUT_S / 5,
        heartbeat_timeout_s=TIMEOUT_S,
        device="cpu",
    )
    lease.update(state="computing", round=4, calm=True)
    lease.beat()
    clock.meanwhile = lambda: lease.beat_if_due() if clock.now_s % 3 == 0 else None
    assert claim(store, clock).replica == 1
    assert clock.now_s == 3.0


def test_a_claim_without_a_lease_is_dead_after_the_timeout(store: LocalStore) -> None:
    claim_incarnation(store, 0, nonce="00000000")
    clock = ManualClock()
    assert claim(store, clock).replica == 0
    assert clock.now_s == TIMEOUT_S


def test_a_process_that_claims_meanwhile_is_alive(store: LocalStore) -> None:
    owned(store, 0)
    clock = ManualClock()

    def another_takes_it() -> None:
        if clock.now_s == 1.0:
            claim_incarnation(store, 0, nonce="ffffffff")

    clock.meanwhile = another_takes_it
    assert claim(store, clock).replica == 1
    assert clock.now_s == 1.0


def test_the_loser_of_a_race_never_claims_the_incarnation_after_the_winners(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fence out the winner."""
    owned(store, 0, state="left")
    create = LocalStore.create

    def another_is_first(self: LocalStore, key: str, data: bytes) -> bool:
        monkeypatch.undo()
        assert create(self, key, b"ffffffff")
        return create(self, key, data)

    monkeypatch.setattr(LocalStore, "create", another_is_first)
    assert claim(store).replica == 1
    assert {info.key for info in store.list(keys.member(0)) if keys.parse_claim(info.key)} == {
        keys.claim(0, 1),
        keys.claim(0, 2),
    }


def test_processes_that_start_at_once_get_different_numbers(store: LocalStore) -> None:
    patient = dataclasses.replace(
        SETTINGS, max_replicas=6, heartbeat_timeout_s=3600.0, round_timeout_s=7200.0
    )
    clock, barrier, taken = FastClock(), threading.Barrier(6), []

    def run() -> None:
        barrier.wait()
        process = claim_process(store, patient, None, clock=clock)
        taken.append(process.replica)
        count, give_up_s = 0, clock.monotonic() + 3600.0
        while len(taken) < 6 and clock.monotonic() < give_up_s:
            count += 1
            write(store, beat(**vars(process), count=count))
            clock.sleep(0.5)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [0, 1, 2, 3, 4, 5]


def test_a_group_whose_numbers_are_all_in_use_refuses(store: LocalStore) -> None:
    beats = [owned(store, number) for number in range(SETTINGS.max_replicas)]
    clock = ManualClock(meanwhile=lambda: [each() for each in beats] and None)
    with pytest.raises(ReplicaError, match=r"found all 4 in use.*larger max_replicas"):
        claim(store, clock)


def test_a_number_without_a_next_incarnation_is_not_taken(store: LocalStore) -> None:
    store.create(keys.claim(0, LAST_SEQ), b"00000000")
    assert claim(store).replica == 1


def test_it_reports_what_it_waits_for_once(store: LocalStore) -> None:
    owned(store, 0)
    reported: list[str] = []
    claim(store, report=reported.append)
    assert reported == [
        "checking the leases of other replicas for up to 15 s, to take a free number: 0"
    ]


def test_a_store_without_conditional_writes_needs_a_number(store: LocalStore) -> None:
    store.atomic_create = False
    with pytest.raises(ReplicaError, match=r"no conditional writes.*Pass replica= or set REPLICA"):
        claim(store)
    given = claim_process(store, SETTINGS, 3, clock=ManualClock())
    assert given.replica == 3


@pytest.mark.parametrize("request_number", [2, 3, 4, 5])
@pytest.mark.parametrize("has_lease", [False, True])
def test_an_owner_that_was_silent_in_an_outage_keeps_its_number(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    request_number: int,
    has_lease: bool,
) -> None:
    """The owner goes on after the outage, or has the time to while this process is suspended."""
    process = claim_incarnation(store, 0, nonce="00000000")
    clock, count, requests, outage = ManualClock(), 0, 0, True
    listed = LocalStore.list

    def next_beat() -> None:
        nonlocal count
        count += 1
        write(store, beat(**vars(process), count=count))

    def slow(self: LocalStore, prefix: str, **options: int) -> list[ObjectInfo]:
        nonlocal requests, outage
        requests += 1
        found = listed(self, prefix, **options)
        if requests == request_number:
            clock.now_s += 4 * TIMEOUT_S
            outage = False
        return found

    if has_lease:
        next_beat()
    clock.meanwhile = lambda: None if outage else next_beat()
    monkeypatch.setattr(LocalStore, "list", slow)
    assert claim(store, clock).replica == 1
