"""One step's allreduce calls: coalesced, uploaded, and everybody's summed, in the background.

torchft calls ``allreduce`` once per parameter, and one object per tensor would cost a request each.
So calls are gathered until the caller waits for one or none has come for ``coalesce_s``; then they
go up as one object, a *batch*, while the caller computes on. While fewer calls have come than an
earlier step made, the pause has to be :data:`PATIENCE` times as long, because on a busy machine the
calls of one sync can be far apart. Members need not cut their calls into
the same batches: a reader asks a member for its call number i, and takes as many of that member's
batches as that takes. What does have to agree is the sequence of calls.

Every member sums everybody's tensors itself, in the quorum's order, in fp32 (fp64 for float64,
int64 for integers): all get the same bits. Members that do not contribute send nothing.

Errors end in the future of the call and of every later one: :class:`ValueError` where two members'
calls differ, :class:`~diloco.exchange.payload.BadPayload`, :class:`MemberLost`,
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

from diloco.clock import Clock
from diloco.exchange.payload import BadPayload
from diloco.protocol import manager_keys
from diloco.protocol.records import Identity
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from diloco.torchft.polling import MemberLost, Waiting
from diloco.torchft.tensor_codec import Spec, decode, encode, largest_payload, pack, unpack

READERS = 8
"""Members read from at once."""
PATIENCE = 40
"""How much longer than ``coalesce_s`` a pause between the expected calls of a step can be."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What an exchange has to know of its round."""

    n: int
    me: Identity
    contributors: tuple[Identity, ...]
    divisor: int
    timeout_s: float
    coalesce_s: float
    expected_calls: int = 0


@dataclass(frozen=True)
class Call:
    """``body`` is this member's tensor; ``result`` will be the sum or mean, (numel,) on the CPU."""

    index: int
    spec: Spec
    body: memoryview
    result: Future[Tensor] = field(default_factory=Future)


class Exchange:
    """The calls of one round, in order. ``why_lost`` says why a member will send no more, or ''."""

    def __init__(
        self,
        store: Store,
        round: Round,
        *,
        clock: Clock,
        poll_interval_s: float,
        why_lost: Callable[[Identity], str],
    ) -> None:
        self._store = store
        self._round = round
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._abandoned = threading.Event()
        self._feeds = {
            who: _Feed(store, round.n, who, why_lost) for who in round.contributors
            if who != round.me
        }  # fmt: skip
        self._calls = 0
        self._arriving = 0
        self._batches = 0
        self._pending: list[Call] = []
        self._wanted = False
        self._closed = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, tensor: Tensor, spec: Spec) -> Call:
        """Take a copy of ``tensor`` as the next call."""
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
        """How many calls this step has made so far."""
        return self._calls

    def flush(self) -> None:
        """Send what has been gathered now: the caller waits."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def close(self) -> None:
        """No more calls will come. Those that did are still finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """What is not done yet is not wanted any more."""
        self._abandoned.set()
        self.close()

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
        """The calls so far, once they are wanted or no more are coming; none at the end."""
        with self._changed:
            while not self._pending and not self._closed:
                self._changed.wait()
            seen = 0
            while not (self._wanted or self._closed):
                if len(self._pending) == seen and not self._arriving:
                    break
                seen = len(self._pending)
                pause_s = self._round.coalesce_s
                if self._calls < self._round.expected_calls:
                    pause_s *= PATIENCE
                self._changed.wait(pause_s)  # any call, flush or close ends it
            calls, self._pending = self._pending, []
            self._wanted = False
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
        """Read from all members at once whose next call is not there yet."""
        empty = [feed for feed in self._feeds.values() if not feed.ready]
        if not empty:
            return
        with ThreadPoolExecutor(min(READERS, len(empty)), "exchange-read") as pool:
            futures = [pool.submit(feed.fill, self._waiting()) for feed in empty]
            try:
                for future in as_completed(futures):
                    future.result()
            except Exception:
                self._abandoned.set()  # for the others: the step has failed
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
        for who in self._round.contributors:
            own = who == self._round.me
            body = call.body if own else self._feeds[who].take(call)
            theirs = _widened(decode(body, spec))
            total = theirs if total is None else _COMBINE[spec.op](total, theirs)
        if total is None:
            raise MemberLost(f"round {self._round.n}: expected somebody to contribute, found none")
        return total.div_(self._round.divisor) if spec.op == "avg" else total


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "avg": lambda total, theirs: total.add_(theirs),
    "sum": lambda total, theirs: total.add_(theirs),
    "product": lambda total, theirs: total.mul_(theirs),
    "min": lambda total, theirs: torch.minimum(total, theirs),
    "max": lambda total, theirs: torch.maximum(total, theirs),
}
OPS = frozenset(_COMBINE)


def _widened(tensor: Tensor) -> Tensor:
    """Memory of its own, in the type that is summed in."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


class _Feed:
    """Another member's calls, in order, out of as many objects as it made of them."""

    def __init__(
        self, store: Store, n: int, who: Identity, why_lost: Callable[[Identity], str]
    ) -> None:
        self._store = store
        self._n = n
        self._who = who
        self._why_lost = why_lost
        self._next_call = 0
        self._next_batch = 0
        self.ready: deque[tuple[Spec, memoryview]] = deque()

    def fill(self, wait: Waiting) -> None:
        """Wait for this member's next object and take it apart."""
        data = self._read(wait)
        calls = unpack(data, self._who, n=self._n, batch=self._next_batch, first=self._next_call)
        self.ready.extend(calls)
        self._next_call += len(calls)
        self._next_batch += 1

    def take(self, call: Call) -> memoryview:
        spec, body = self.ready.popleft()
        if spec != call.spec:
            raise ValueError(
                f"allreduce call {call.index}: expected {call.spec} as on this member, found "
                f"{spec} on member {self._who.replica}"
            )
        return body

    def _get(self, key: str) -> bytes:
        try:
            return self._store.get(key, limit=largest_payload())
        except ObjectTooLarge as error:
            raise BadPayload(str(error)) from None

    def _read(self, wait: Waiting) -> bytes:
        who = self._who
        key = manager_keys.payload(self._n, who.replica, who.incarnation, self._next_batch)
        while True:
            try:
                return self._get(key)
            except MissingKey:
                pass
            if why := self._why_lost(who):
                try:
                    return self._get(key)  # it may have come just before
                except MissingKey:
                    raise MemberLost(f"member {who.replica} {why}") from None
            if not wait.pause():
                raise TimeoutError(
                    f"expected the tensors of member {who.replica} in round {self._n} within "
                    f"{wait.waited_s:.1f} s, found none"
                )
