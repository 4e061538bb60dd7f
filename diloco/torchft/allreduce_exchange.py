"""The allreduce calls of one step: coalesced, uploaded and reduced in the background.

torchft calls ``allreduce`` once per parameter, and one object per tensor would cost one request
each. So calls are collected until the caller waits for one, or until none has arrived for
``coalesce_s``. Then they are uploaded as one object, a *batch*, while the caller continues. Until
there are as many calls as in an earlier step, the pause must be :data:`PATIENCE` times as long,
because on a busy machine the calls of one step can be far apart. Members can split their calls into
different batches: a reader fetches a member's batches in order until it has the call. Only the
sequence of calls must be equal.

Every member reduces the tensors of all members, in the order of the quorum, in fp32 (fp64 for
float64, int64 for integers), so all members get the same bits. Members that do not contribute
upload nothing.

Errors are set on the future of the call and of every later call: :class:`ValueError` if the calls
of two members differ, :class:`~diloco.exchange.payload.BadPayload`, :class:`MemberLost`,
:class:`TimeoutError`, :class:`~diloco.store.base.StoreError`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from diloco.clock import Clock
from diloco.exchange.checked_blocks import BadPayload
from diloco.protocol import manager_keys
from diloco.protocol.records import Identity
from diloco.store.base import ObjectTooLarge, Store
from diloco.torchft.polling import MemberLost, Waiting
from diloco.torchft.tensor_codec import (
    Spec,
    decode,
    encode,
    largest_payload,
    pack,
    spec_of,
    unpack,
)
from diloco.torchft.work import ManagedWork, skipped

READERS = 8
"""Number of members read in parallel."""
PATIENCE = 40
"""Factor on ``coalesce_s`` while a step has fewer calls than expected."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The parameters of a round's exchange. ``divisor`` is the number of participants."""

    n: int
    me: Identity
    contributors: tuple[Identity, ...]
    divisor: int
    timeout_s: float
    coalesce_s: float
    expected_calls: int = 0


@dataclass(frozen=True)
class Call:
    """One call: ``body`` is this member's tensor, ``result`` the reduced one, (numel,) on the
    CPU."""

    index: int
    spec: Spec
    body: memoryview
    result: Future[Tensor] = field(default_factory=Future)


class Exchange:
    """The allreduce calls of one round, in order.

    ``why_lost`` returns why a member will send no more data, or ''. ``report`` receives every
    exception of a call.
    """

    def __init__(
        self,
        store: Store,
        round: Round,
        *,
        clock: Clock,
        poll_interval_s: float,
        why_lost: Callable[[Identity], str],
        report: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._round = round
        self._report = report
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._abandoned = threading.Event()
        self._feeds = {
            member: _Feed(store, round.n, member, why_lost)
            for member in round.contributors
            if member != round.me
        }
        self._works: list[ManagedWork] = []
        self._calls = 0
        self._arriving = 0
        self._batches = 0
        self._pending: list[Call] = []
        self._flush_requested = False
        self._closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, tensor: Tensor, *, op: str, quantise: bool) -> ManagedWork:
        """Start the next call; the Work returned writes the result to ``tensor``."""
        target = tensor.detach()
        try:
            call = self._submit(target, spec_of(target, op=op, quantise=quantise))
        except Exception as error:
            self._report(error)
            return skipped(tensor, self._report)

        def finish(timeout_s: float | None) -> None:
            self._flush()
            target.copy_(call.result.result(timeout_s).view(target.shape))

        work = ManagedWork(tensor, finish, self._report)
        self._works.append(work)
        return work

    def finish(self, failed: Callable[[], bool]) -> None:
        """Wait for all works that the caller has not awaited (torchft's
        PureDistributedDataParallel does not), unless the step has ``failed``; then end."""
        for work in self._works:
            if not failed():
                work.wait()
        if failed():
            self.abandon()
        else:
            self._close()

    def _submit(self, tensor: Tensor, spec: Spec) -> Call:
        """Add the next call, with a copy of ``tensor``."""
        contributes = self._round.me in self._round.contributors
        with self._changed:
            self._arriving += 1
        try:
            body = encode(tensor, spec) if contributes else memoryview(b"")
        finally:
            with self._changed:
                self._arriving -= 1
        with self._changed:
            call = Call(self._calls, spec, body)
            self._calls += 1
            self._pending.append(call)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
                self._thread.start()
        return call

    @property
    def calls(self) -> int:
        """Number of calls of this step so far."""
        return self._calls

    def _flush(self) -> None:
        """Upload the collected calls now, because the caller waits."""
        with self._changed:
            self._flush_requested = True
            self._changed.notify_all()

    def _close(self) -> None:
        """Accept no more calls. Earlier calls are still completed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Cancel all calls that are not complete."""
        self._abandoned.set()
        self._close()

    def _run(self) -> None:
        while calls := self._next_batch():
            try:
                if self._failure is None:
                    self._do(calls)
            except Exception as error:
                self._failure = error
            for call in calls:
                if self._failure is not None and not call.result.done():
                    call.result.set_exception(self._failure)

    def _next_batch(self) -> list[Call]:
        """Wait for the next batch of calls: until a flush or a pause. Empty at the end."""
        with self._changed:
            while not self._pending and not self._closed:
                self._changed.wait()
            seen = 0
            while not (self._flush_requested or self._closed):
                if len(self._pending) == seen and not self._arriving:
                    break
                seen = len(self._pending)
                pause_s = self._round.coalesce_s
                if self._calls < self._round.expected_calls:
                    pause_s *= PATIENCE
                self._changed.wait(pause_s)  # any call, flush or close ends it
            calls, self._pending = self._pending, []
            self._flush_requested = False
            return calls

    def _do(self, calls: list[Call]) -> None:
        round = self._round
        if round.me in round.contributors:
            data = pack(
                round.me,
                [(call.spec, call.body) for call in calls],
                n=round.n,
                batch=self._batches,
                first=calls[0].index,
            )
            me = round.me
            key = manager_keys.payload(round.n, me.replica, me.incarnation, self._batches)
            self._store.put(key, data)
            self._batches += 1
        for call in calls:
            self._fill()
            call.result.set_result(self._reduced(call))

    def _fill(self) -> None:
        """Read in parallel from all members whose next call has not been read yet."""
        empty = [feed for feed in self._feeds.values() if not feed.ready]
        if not empty:
            return
        with ThreadPoolExecutor(min(READERS, len(empty)), "exchange-read") as pool:
            futures = [pool.submit(feed.fill, self._waiting()) for feed in empty]
            try:
                for future in as_completed(futures):
                    future.result()
            except Exception:
                self._abandoned.set()  # stops the other readers: the step has failed
                raise

    def _waiting(self) -> Waiting:
        return Waiting(
            self._clock,
            self._abandoned,
            timeout_s=self._round.timeout_s,
            longest_pause_s=self._poll_interval_s,
        )

    def _reduced(self, call: Call) -> Tensor:
        spec, total = call.spec, None
        for member in self._round.contributors:
            own = member == self._round.me
            body = call.body if own else self._feeds[member].take(call)
            operand = _widened(decode(body, spec))
            total = operand if total is None else _COMBINE[spec.op](total, operand)
        if total is None:
            raise MemberLost(f"round {self._round.n}: expected contributors, found none")
        return total.div_(self._round.divisor) if spec.op == "avg" else total


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "avg": lambda total, operand: total.add_(operand),
    "sum": lambda total, operand: total.add_(operand),
    "product": lambda total, operand: total.mul_(operand),
    "min": lambda total, operand: torch.minimum(total, operand),
    "max": lambda total, operand: torch.maximum(total, operand),
}
OPS = frozenset(_COMBINE)


def op_name(reduce_op: object) -> str:
    """Return the lower-case name of a torch ReduceOp, of its enum member or of a string. Raises
    :class:`ValueError` for an unsupported operation."""
    name = reduce_op.lower() if isinstance(reduce_op, str) else ""
    for op in OPS:
        if name == op or (not name and reduce_op == getattr(ReduceOp, op.upper())):
            return op
    raise ValueError(f"reduce_op: expected one of {sorted(OPS)}, found {reduce_op!r}")


def _widened(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype of the reduction."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


class _Feed:
    """The calls of another member, in order, read from its batches."""

    def __init__(
        self, store: Store, n: int, member: Identity, why_lost: Callable[[Identity], str]
    ) -> None:
        self._store = store
        self._n = n
        self._member = member
        self._why_lost = why_lost
        self._next_call = 0
        self._next_batch = 0
        self.ready: deque[tuple[Spec, memoryview]] = deque()

    def fill(self, wait: Waiting) -> None:
        """Wait for this member's next batch and parse it."""
        data = self._read(wait)
        calls = unpack(data, self._member, n=self._n, batch=self._next_batch, first=self._next_call)
        self.ready.extend(calls)
        self._next_call += len(calls)
        self._next_batch += 1

    def take(self, call: Call) -> memoryview:
        """Return this member's tensor of the call. Raises :class:`ValueError` if specs differ."""
        spec, body = self.ready.popleft()
        if spec != call.spec:
            raise ValueError(
                f"allreduce call {call.index}: expected {call.spec} as on this member, found "
                f"{spec} on member {self._member.replica}"
            )
        return body

    def _get(self, key: str) -> bytes:
        try:
            return self._store.get(key, limit=largest_payload())
        except ObjectTooLarge as error:
            raise BadPayload(str(error)) from None

    def _read(self, wait: Waiting) -> bytes:
        member = self._member
        key = manager_keys.payload(self._n, member.replica, member.incarnation, self._next_batch)
        return wait.read(
            lambda: self._get(key),
            f"the tensors of member {member.replica} in round {self._n}",
            writer=f"member {member.replica}",
            why_lost=lambda: self._why_lost(member),
        )
