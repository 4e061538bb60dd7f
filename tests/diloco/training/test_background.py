"""Checkpoints and replica states are written while the replica trains."""

from __future__ import annotations

import fnmatch
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import ReplicaError, StopTraining
from diloco.exchange.inflight_rounds import InflightRound
from diloco.protocol import keys
from diloco.protocol.records import ReplicaStateManifest
from diloco.store.base import LocalStore, StoreDenied
from diloco.store.multipart import Data, MakeParts
from diloco.training.background import (
    CHECKPOINT,
    PACKS,
    STATE,
    BackgroundWrites,
    WriteCancelled,
)
from diloco.training.checkpoint import manifest_rounds
from diloco.training.local_progress import LocalProgress
from diloco.training.post_round import PostRoundTasks
from diloco.training.stored_objects import load_tensors
from tests.diloco.clocks import ManualClock

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a failed member
)


class Slow(LocalStore):
    """An upload to a key that matches ``pattern`` reads its first part after ``release`` only."""

    def __init__(self, root: Path, pattern: str) -> None:
        super().__init__(root)
        self.pattern = pattern
        self.release = threading.Event()
        self.created: list[str] = []

    def create(self, key: str, data: Data) -> bool:
        if key == keys.FINAL_MANIFEST:
            self.release.set()
        self.created.append(key)
        return super().create(key, data)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        if fnmatch.fnmatch(key, self.pattern):
            assert self.release.wait(600)
        super().put_stream(key, make_parts, size_bytes=size_bytes)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Event]:
    """Set when the training thread waits for a write of the kind."""
    events = {CHECKPOINT: threading.Event(), STATE: threading.Event()}
    finish = BackgroundWrites.finish

    def watched(writes: BackgroundWrites, kind: str, *check: Callable[[], None]) -> None:
        if writes.is_running(kind):
            events[kind].set()
        finish(writes, kind, *check)

    monkeypatch.setattr(BackgroundWrites, "finish", watched)
    return events


def released(event: threading.Event, store: Slow, member: Any) -> list[tuple[int, int]]:
    """Release the upload when the training thread waits for it, or has applied the next round;
    return the steps of the replica until then, and the rounds to which it has contributed."""
    found: list[tuple[int, int]] = []

    def watch() -> None:
        assert event.wait(600)
        rounds = {info.key.split("/")[1] for info in store.list("rounds/")}
        found.append((member().steps, len(rounds)))
        store.release.set()

    threading.Thread(target=watch, daemon=True).start()
    return found


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_replica_trains_while_its_checkpoint_is_written(
    tiny_group: MakeGroup, waits: dict[str, threading.Event], fragments: int
) -> None:
    """The next outer step waits, so that the checkpoint is that of its round."""
    group = tiny_group(
        num_replicas=1, total_rounds=3, num_fragments=fragments, sync_every=4 * fragments
    )
    store = group.store = Slow(group.root, "checkpoints/00000002/*/weights.safetensors")
    waiting = waits[CHECKPOINT]

    def applied(member: Any, joined: Any) -> None:
        if joined._loop.state.round > 3:
            waiting.set()

    found = released(waiting, store, lambda: member)
    member = group.start(0, momentum=0.9, on_step=applied)
    group.wait()
    group.assert_agreed(member)
    assert found == [(3 * 4, 3)], "round 3 is computed and exchanged meanwhile"
    assert torch.equal(group.replayed(start=2), member.weights())


def test_a_state_is_saved_as_it_was_while_training_continues(
    tiny_group: MakeGroup, waits: dict[str, threading.Event]
) -> None:
    """The optimizer changes at every step; the next exchange waits for the write."""
    group = tiny_group(num_replicas=1, total_rounds=3, state_every=1, checkpoint_every=100)
    store = group.store = Slow(group.root, "state/*.00000001/state.safetensors")
    momentum: dict[int, list[torch.Tensor]] = {}

    def watch(member: Any, joined: Any) -> None:
        buffers = [state["momentum_buffer"] for state in member.optimizer.state.values()]
        momentum[member.steps] = [buffer.clone() for buffer in buffers]

    found = released(waits[STATE], store, lambda: member)
    member = group.start(0, momentum=0.9, on_step=watch)
    group.wait()
    group.assert_agreed(member)
    assert found == [(6, 1)], "the inner steps of round 2 are made meanwhile"
    [key] = [
        info.key for info in store.list(keys.replica_state(0)) if ".00000001/manifest" in info.key
    ]
    saved = load_tensors(store, ReplicaStateManifest.from_bytes(store.get(key)).tensors)
    buffers = {tuple(tensor.flatten().tolist()) for tensor in saved.values()}
    assert buffers == {tuple(tensor.flatten().tolist()) for tensor in momentum[3]}
    assert buffers != {tuple(tensor.flatten().tolist()) for tensor in momentum[6]}


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_vectors_of_an_exchange_are_freed_before_the_state_is_copied(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    gradients: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    opens, saves = LocalProgress.open, PostRoundTasks.save_own

    def opened(progress: LocalProgress, round: int, fragment: int) -> InflightRound | None:
        result = opens(progress, round, fragment)
        assert result is not None
        gradients.append(weakref.ref(result.gradient))
        return result

    def saved(tasks: PostRoundTasks) -> None:
        alive.append(sum(gradient() is not None for gradient in gradients))
        saves(tasks)

    monkeypatch.setattr(LocalProgress, "open", opened)
    monkeypatch.setattr(PostRoundTasks, "save_own", saved)
    group = tiny_group(num_replicas=1, state_every=1, overlap_steps=overlap)
    group.start(0)
    group.wait()
    assert len(gradients) == 4 and alive == [0, 0, 0]


def test_the_error_of_a_write_ends_the_replica(tiny_group: MakeGroup) -> None:
    class Refusing(LocalStore):
        def put_stream(
            self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None
        ) -> None:
            if key.startswith("checkpoints/00000002/"):
                raise StoreDenied(f"{key}: quota exceeded")
            super().put_stream(key, make_parts, size_bytes=size_bytes)

    group = tiny_group(num_replicas=1, total_rounds=8)
    group.store = Refusing(group.root)
    member = group.start(0)
    group.wait()
    assert "quota exceeded" in str(member.error)
    assert manifest_rounds(group.store) == [0]


def test_the_last_checkpoint_is_complete_before_the_run_ends(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=3, checkpoint_every=100)
    store = group.store = Slow(group.root, "checkpoints/00000003/*/outer.safetensors")
    close = BackgroundWrites.close

    def watched(writes: BackgroundWrites, give_up: Callable[[], bool]) -> None:
        store.release.set()
        close(writes, give_up)

    monkeypatch.setattr(BackgroundWrites, "close", watched)
    group.start(0)
    group.wait()
    assert manifest_rounds(store) == [0, 3]
    assert store.created[-2:] == [keys.checkpoint_manifest(3), keys.FINAL_MANIFEST]


def test_a_replica_that_must_leave_cancels_its_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.training.background.CANCELLED_S", 600)
    writes, cancelled = BackgroundWrites(), threading.Event()
    begun = threading.Event()

    def upload() -> None:
        begun.set()
        try:
            while True:
                writes.check(CHECKPOINT)
        except WriteCancelled:
            cancelled.set()
            raise

    writes.start(CHECKPOINT, upload)
    assert begun.wait(600) and writes.is_running(CHECKPOINT)
    writes.close(lambda: True)
    assert cancelled.is_set() and not writes.is_running(CHECKPOINT)
    writes.close(lambda: True)  # again, when the process ends with an error


def test_a_request_that_hangs_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diloco.training.background.CANCELLED_S", 0.01)
    writes, answered = BackgroundWrites(), threading.Event()
    hanging: list[threading.Thread] = []

    def upload() -> None:
        hanging.append(threading.current_thread())
        assert answered.wait(300)
        writes.check(CHECKPOINT)

    writes.start(CHECKPOINT, upload)
    closing = threading.Thread(target=writes.close, args=(lambda: True,), daemon=True)
    closing.start()
    closing.join(600)
    try:
        assert not closing.is_alive()
        assert "the checkpoint is not complete: a request of the store hangs" in caplog.text
        assert hanging[0].is_alive() and hanging[0].daemon, "the interpreter does not wait for it"
        assert not writes.is_running(CHECKPOINT)
    finally:
        answered.set()
    hanging[0].join(600)


@pytest.fixture
def stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[BackgroundWrites, ManualClock, threading.Event]]:
    """A write whose second part hangs, until the event is set."""
    monkeypatch.setattr("diloco.training.background.POLL_S", 0.01)
    monkeypatch.setattr("diloco.training.background.CANCELLED_S", 0.01)
    clock, answered, begun = ManualClock(), threading.Event(), threading.Event()
    writes = BackgroundWrites(clock=clock, longest_pause_s=100.0)

    def upload() -> None:
        writes.check(CHECKPOINT)
        begun.set()
        assert answered.wait(300)

    clock.now_s = 50.0
    writes.start(CHECKPOINT, upload)
    assert begun.wait(600)
    yield writes, clock, answered
    answered.set()


def test_a_wait_for_a_write_without_progress_ends(
    stalled: tuple[BackgroundWrites, ManualClock, threading.Event],
) -> None:
    writes, clock, _ = stalled
    polls: list[float] = []

    def check() -> None:
        polls.append(clock.now_s)
        clock.now_s += 50.0

    with pytest.raises(ReplicaError, match=r"expected the checkpoint .* no progress for 100 s"):
        writes.finish(CHECKPOINT, check)
    assert polls == [50.0, 100.0, 150.0], "100 s after the last part"


def test_a_write_without_progress_does_not_delay_the_end_of_a_run(
    stalled: tuple[BackgroundWrites, ManualClock, threading.Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run that is complete has no deadline."""
    writes, clock, _ = stalled

    def give_up() -> bool:
        clock.now_s += 50.0
        return False

    writes.close(give_up)
    assert clock.now_s == 200.0
    assert "the checkpoint is not complete: a request of the store hangs" in caplog.text


def test_a_replica_with_time_completes_its_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.training.background.POLL_S", 0.01)
    writes, polled = BackgroundWrites(), threading.Event()
    written: list[str] = []

    def upload() -> None:
        assert polled.wait(600)
        writes.check(STATE)
        written.append("state")

    def give_up() -> bool:
        polled.set()
        return False

    writes.start(STATE, upload)
    writes.close(give_up)
    assert written == ["state"]


def test_a_replica_that_is_behind_can_leave_while_its_checkpoint_is_written(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catching up changes the tensors of the checkpoint, so it waits; the lease shows for what."""
    monkeypatch.setattr("diloco.training.background.POLL_S", 0.01)
    group = tiny_group(num_replicas=1, total_rounds=8, round_timeout_s=7200.0)
    store = group.store = Slow(group.root, "checkpoints/00000002/*/weights.safetensors")
    shown: list[str] = []

    def leave(member: Any, joined: Any) -> None:
        if not shown and joined._loop.tasks._writes.is_running(CHECKPOINT):
            assert joined._loop.tasks._writes._longest_pause_s == 7200.0
            joined.leave()
            with pytest.raises(StopTraining):
                joined._loop._catch_up.reload(at_least=0)
            shown.append(joined._lease.progress.message)
            store.release.set()

    member = group.start(0, on_step=leave)
    group.wait()
    assert member.error is None
    assert shown == ["writing the checkpoint of round 2"]


def test_writes_of_one_kind_run_one_after_another() -> None:
    writes = BackgroundWrites()
    order: list[int] = []
    for number in range(5):
        writes.start(STATE, lambda number=number: order.append(number))
    writes.finish(STATE)
    assert order == list(range(5))
    writes.finish(STATE)
    writes.close(lambda: False)


@pytest.mark.parametrize("pattern", ["checkpoints/00000002/*", "state/*.00000002/*"])
def test_a_replica_leaves_while_it_waits_for_a_write(
    tiny_group: MakeGroup,
    waits: dict[str, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
) -> None:
    """It has contributed the steps until then, and saves its state."""
    monkeypatch.setattr("diloco.training.background.POLL_S", 0.01)
    group = tiny_group(num_replicas=1, total_rounds=8, state_every=2)
    store = group.store = Slow(group.root, pattern)
    close = BackgroundWrites.close
    ended: list[bool] = []

    def closed(writes: BackgroundWrites, give_up: Callable[[], bool]) -> None:
        ended.append(store.release.is_set())
        store.release.set()
        close(writes, give_up)

    monkeypatch.setattr(BackgroundWrites, "close", closed)
    is_state = pattern.startswith("state")

    def leave(member: Any, joined: Any) -> None:
        def request() -> None:
            assert waits[STATE if is_state else CHECKPOINT].wait(600)
            joined.leave(within_s=0.0)

        if member.steps == 1:
            threading.Thread(target=request, daemon=True).start()

    member = group.start(0, on_step=leave)
    group.wait()
    assert member.error is None
    assert ended[0] is False, "the replica did not wait for the write"


def test_the_end_of_a_process_does_not_wait_for_packs() -> None:
    """A later process continues them, and the result of a run is published after this."""
    writes, cancelled, release = BackgroundWrites(), threading.Event(), threading.Event()

    def pack() -> None:
        while not release.wait(0.01):
            try:
                writes.check(PACKS)
            except WriteCancelled:
                cancelled.set()
                raise

    writes.start(PACKS, pack)
    writes.start(CHECKPOINT, lambda: writes.check(CHECKPOINT))
    closed = threading.Thread(target=writes.close, args=(lambda: False,), daemon=True)
    closed.start()
    closed.join(600)
    try:
        assert not closed.is_alive() and cancelled.is_set()
    finally:
        release.set()
