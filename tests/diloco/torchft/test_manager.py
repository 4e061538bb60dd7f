"""Managers over one store: allreduce, steps, errors and configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import FencedOut
from diloco.manager import Manager
from diloco.protocol import keys, manager_keys
from diloco.protocol.manager_rounds import ConfigMismatch
from diloco.store.base import LocalStore
from diloco.torchft.polling import ShutDown
from tests.diloco.manager_harness import Harness, step
from tests.servers import wait_until


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


def test_the_step_increments_only_on_a_commit(harness: Harness) -> None:
    def member(replica: int) -> Callable[[], list[object]]:
        def run() -> list[object]:
            manager = harness.make(replica, min_replica_size=2, init_sync=False)
            seen: list[object] = [manager.num_participants(), manager.participating_rank()]
            for _ in range(2):
                manager.start_quorum()
                manager.wait_quorum()
                seen += [manager.current_step(), manager.batches_committed()]
                manager.allreduce(torch.ones(1)).wait()
                seen.append(manager.current_step())
                assert manager.should_commit()
            seen += [manager.state_dict(), manager.num_participants()]
            seen += [manager.participating_rank(), manager.is_participating()]
            return seen

        return run

    counts = {"step": 2, "batches_committed": 4}
    expected = [0, None, 0, 0, 0, 1, 2, 1, counts, 2]
    assert harness.together(member(0), member(1)) == [
        [*expected, 0, True],
        [*expected, 1, True],
    ]


def payloads(harness: Harness, n: int) -> list[str]:
    prefix = f"{manager_keys.round_dir(n)}payloads/"
    return [info.key for info in harness.store.list(prefix)]


def test_all_calls_of_a_step_are_one_object(harness: Harness) -> None:
    manager = harness.make(0)
    manager.start_quorum()
    tensors = [torch.full((3,), float(k)) for k in range(20)]
    works = [manager.allreduce(tensor) for tensor in tensors]
    assert payloads(harness, 1) == []
    assert all(work.wait() for work in works)
    assert len(payloads(harness, 1)) == 1
    assert manager.should_commit()


def test_the_upload_starts_before_a_wait(harness: Harness) -> None:
    manager = harness.make(0, coalesce=timedelta(0))
    manager.start_quorum()
    work = manager.allreduce(torch.ones(3))
    wait_until(lambda: payloads(harness, 1), "the upload")
    assert len(payloads(harness, 1)) == 1
    assert work.wait()


def test_members_can_batch_their_calls_differently(harness: Harness) -> None:
    def member(replica: int, waits: list[int]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            manager = harness.make(replica, min_replica_size=2, init_sync=False)
            manager.start_quorum()
            tensors = [torch.tensor([float(k + replica)]) for k in range(5)]
            works = [manager.allreduce(tensor) for tensor in tensors[: waits[0]]]
            works[-1].wait()
            works += [manager.allreduce(tensor) for tensor in tensors[waits[0] :]]
            assert manager.should_commit()
            return [tensor.item() for tensor in tensors]

        return run

    expected = [0.5, 1.5, 2.5, 3.5, 4.5]
    assert harness.together(member(0, [1]), member(1, [4])) == [expected, expected]


def test_works_not_awaited_complete_at_the_commit(harness: Harness) -> None:
    def member(replica: int) -> Callable[[], float]:
        def run() -> float:
            manager = harness.make(replica, min_replica_size=2, init_sync=False)
            manager.start_quorum()
            tensor = torch.tensor([float(replica)])
            manager.allreduce(tensor)
            assert manager.should_commit()
            return tensor.item()

        return run

    assert harness.together(member(0), member(1)) == [0.5, 0.5]


def test_callbacks_run_in_order_during_wait(harness: Harness) -> None:
    manager = harness.make(0)
    manager.start_quorum()
    tensor = torch.tensor([3.0])
    work = manager.allreduce(tensor)
    ran: list[object] = []

    def first(future: Any) -> str:
        ran.append(future.value().item())
        return "from first"

    future = work.get_future().then(first)
    work.get_future().then(lambda future: ran.append(future.value()))
    assert ran == []
    assert not future.done()
    assert work.wait()
    assert ran == [3.0, "from first"]
    assert work.wait()  # again: nothing runs twice
    assert ran == [3.0, "from first"]
    assert future.wait() == "from first"
    tail = work.get_future()
    assert tail._fut is not None
    assert tail._fut.done()


def test_a_callback_that_fails_fails_the_step(harness: Harness) -> None:
    manager = harness.make(0)
    manager.start_quorum()
    work = manager.allreduce(torch.ones(1))

    def broken(future: Any) -> None:
        raise RuntimeError("injected")

    work.get_future().then(broken)
    assert not work.wait()
    assert str(manager.errored().original_exception) == "injected"  # type: ignore[union-attr]
    assert not manager.should_commit()


def test_after_an_error_calls_do_nothing_and_no_member_commits(harness: Harness) -> None:
    error = RuntimeError("injected")

    def member(replica: int) -> Callable[[], list[object]]:
        def run() -> list[object]:
            manager = harness.make(replica, min_replica_size=2, init_sync=False)
            seen: list[object] = []
            for attempt in range(2):
                manager.start_quorum()
                assert manager.errored() is None
                if attempt == replica == 0:
                    manager.report_error(error)
                tensor = torch.tensor([float(replica)])
                manager.allreduce(tensor).wait()
                seen.append(tensor.item() if replica == 0 else None)
                seen.append(manager.should_commit())
                seen.append(manager.current_step())
            return seen

        return run

    first, second = harness.together(member(0), member(1))
    assert first == [0.0, False, 0, 0.5, True, 1]
    assert second == [None, False, 0, None, True, 1]


def test_members_whose_calls_differ_do_not_average_them(harness: Harness) -> None:
    def member(replica: int) -> Callable[[], tuple[bool, str]]:
        def run() -> tuple[bool, str]:
            manager = harness.make(replica, min_replica_size=2, init_sync=False)
            committed = step(manager, torch.ones(2 + replica))
            error = manager.errored()
            return committed, str(error.original_exception if error else "")

        return run

    for committed, error in harness.together(member(0), member(1)):
        assert not committed
        assert "allreduce call 0: expected" in error or "gave up" in error


def test_a_damaged_payload_fails_the_step(harness: Harness) -> None:
    class Garbling(LocalStore):
        def get(self, key: str, *, limit: int | None = None) -> bytes:
            data = super().get(key, limit=limit)
            return data[:-1] + b"\xff" if key.endswith(".bin") else data

    def member(replica: int) -> Callable[[], tuple[bool, str]]:
        def run() -> tuple[bool, str]:
            store = Garbling(harness.store.inner.root) if replica == 1 else None  # type: ignore[attr-defined]
            manager = harness.make(replica, store=store, min_replica_size=2, init_sync=False)
            committed = step(manager, torch.ones(3))
            error = manager.errored()
            return committed, str(error.original_exception if error else "")

        return run

    (first, _), (second, error) = harness.together(member(0), member(1))
    assert (first, second) == (False, False)
    assert "checksum" in error


def test_too_many_failures_in_a_row_raise(harness: Harness) -> None:
    manager = harness.make(0, max_retries=1)
    for _ in range(2):  # a success in between sets the count back
        manager.start_quorum()
        manager.report_error(RuntimeError("injected"))
        assert not manager.should_commit()
        manager.start_quorum()
        assert manager.should_commit()
    manager.start_quorum()
    manager.report_error(RuntimeError("injected"))
    assert not manager.should_commit()
    with pytest.raises(RuntimeError, match="2 times consecutively, exceeding max_retries=1"):
        manager.should_commit()


def test_a_missing_quorum_times_out(harness: Harness) -> None:
    manager = harness.make(0, min_replica_size=2)
    with pytest.raises(TimeoutError, match=r"expected a quorum of 2 replicas .* found 0/0"):
        manager.start_quorum(timeout=timedelta(seconds=0.5))
    with pytest.raises(TimeoutError):
        manager.should_commit()


def test_an_asynchronous_quorum_fails_where_it_is_awaited(harness: Harness) -> None:
    manager = harness.make(0, min_replica_size=2, use_async_quorum=True)
    manager.start_quorum(timeout=timedelta(seconds=0.5))
    with pytest.raises(TimeoutError):
        manager.allreduce(torch.ones(1))
    manager.start_quorum(timeout=timedelta(seconds=0.5))  # it can be retried
    with pytest.raises(TimeoutError):
        manager.num_participants()


def test_a_silent_member_fails_the_step_and_the_others_continue(harness: Harness) -> None:
    lost = harness.make(1, min_replica_size=1, init_sync=False)
    keeps = {"min_replica_size": 1, "init_sync": False}
    other = harness.make(0, **keeps, heartbeat_timeout=timedelta(seconds=30))

    def silent() -> None:
        lost.start_quorum()
        lost._session.peers.lease._ended.set()  # as if killed: no last heartbeat

    def survivor() -> list[object]:
        results: list[object] = []
        other.start_quorum()
        results += [other.num_participants()]
        other.allreduce(torch.ones(1)).wait()
        results += [other.should_commit(), str(other.errored().original_exception)]  # type: ignore[union-attr]
        other.start_quorum()
        results += [other.num_participants(), other.should_commit()]
        return results

    _, result = harness.together(silent, survivor)
    assert result == [2, False, "member 1 is gone", 1, True]


def test_a_newer_process_replaces_a_member(harness: Harness) -> None:
    old = harness.make("a")
    new = harness.make("a")
    assert new._session.me.replica == old._session.me.replica
    old._session.peers.lease.look_around()
    with pytest.raises(FencedOut):
        old.start_quorum()
    assert step(new, torch.ones(1))


def test_members_with_different_modes_are_refused(harness: Harness) -> None:
    def member(replica: int) -> Callable[[], None]:
        def run() -> None:
            manager = harness.make(replica, min_replica_size=2, use_async_quorum=replica == 0)
            manager.start_quorum()
            manager.wait_quorum()

        return run

    with pytest.raises(ConfigMismatch, match="same mode of every member"):
        harness.together(member(0), member(1))


def test_payloads_are_deleted_and_decisions_kept(harness: Harness) -> None:
    manager = harness.make(0)
    for _ in range(6):
        assert step(manager, torch.ones(1))
    manager.shutdown()
    keys = [info.key for info in harness.store.list("manager/")]
    rounds = {key.split("/")[2] for key in keys if key.startswith("manager/rounds/")}
    assert rounds == {"00000006"}
    assert len([key for key in keys if key.startswith("manager/quorums/")]) == 6
    assert len([key for key in keys if key.startswith("manager/commits/")]) == 6


def test_errors_of_a_wrapped_future_become_the_default(harness: Harness) -> None:
    manager = harness.make(0)
    future: torch.futures.Future[int] = torch.futures.Future()
    wrapped = manager.wrap_future(future, 2)
    assert manager.errored() is None
    error = RuntimeError("injected")
    future.set_exception(error)
    assert wrapped.wait() == 2
    assert manager.errored().original_exception is error  # type: ignore[union-attr]


def test_a_wrapped_future_that_times_out_becomes_the_default(harness: Harness) -> None:
    manager = harness.make(0)
    future: torch.futures.Future[int] = torch.futures.Future()
    wrapped = manager.wrap_future(future, 2, timedelta(seconds=0.01))
    assert wrapped.wait() == 2
    error = manager.errored()
    assert error is not None
    with pytest.raises(TimeoutError, match=r"future did not complete within 0\.01 s"):
        raise error.original_exception


def test_an_error_of_the_process_group_fails_the_step(harness: Harness) -> None:
    class Group:
        def errored(self) -> Exception:
            return RuntimeError("injected")

    manager = harness.make(0, pg=Group())
    manager.start_quorum()
    assert not manager.should_commit()
    assert str(manager.errored().original_exception) == "injected"  # type: ignore[union-attr]


def test_the_group_store_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="rendezvous: expected a store's URI"):
        Manager(replica_id="a", lighthouse_addr="http://host:1")
    uri = (tmp_path / "one").as_uri()
    Manager(replica_id="a", rank=0, world_size=1, lighthouse_addr=uri).shutdown()
    assert (tmp_path / "one" / manager_keys.name(1)).exists()
    monkeypatch.setenv("ARCHIPELAGO_RENDEZVOUS", tmp_path.as_uri())
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://host:29510")
    Manager(replica_id="a", rank=0, world_size=1).shutdown()
    assert (tmp_path / "http-host-29510" / manager_keys.name(1)).exists()


def test_a_store_without_an_atomic_create_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.atomic_create = False
    with pytest.raises(ValueError, match="expected a store with atomic create"):
        Manager(replica_id="a", rendezvous=store)


def test_the_rendezvous_of_a_diloco_run_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(keys.GROUP, b"{}")
    with pytest.raises(ValueError, match=r"expected one without group\.json"):
        Manager(replica_id="a", rendezvous=store)


def test_the_state_has_torchfts_shape(harness: Harness) -> None:
    manager = harness.make(0)
    counts = {"step": 0, "batches_committed": 0}
    assert manager.state_dict() == counts
    assert manager._manager_state_dict() == {"user": {"default": {}}, "torchft": counts}
    manager.register_state_dict_fn("state", lambda state: None, lambda: {"new": 1})
    assert manager._manager_state_dict()["user"] == {"default": {}, "state": {"new": 1}}
    manager.load_state_dict({"step": 1234, "batches_committed": 2345})
    assert (manager.current_step(), manager.batches_committed()) == (1234, 2345)


def test_a_manager_that_is_shut_down_stops_waiting(harness: Harness) -> None:
    manager = harness.make(0, min_replica_size=2, use_async_quorum=True)
    manager.start_quorum(timeout=timedelta(days=1))
    manager.shutdown()
    with pytest.raises((ShutDown, CancelledError)):
        manager.wait_quorum()
