"""A Manager with the interface of torchft 0.2.0 that needs only an object store.

::

    manager = Manager(
        load_state_dict=load, state_dict=save, min_replica_size=2, use_async_quorum=False,
        replica_id="island-3", rendezvous="s3://bucket/run",
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=500): ...   # torchft's own

torchft's DiLoCo, LocalSGD, OptimizerWrapper and DistributedDataParallel run on it unchanged. There
is no lighthouse, no process group and no TCP store: members meet in the store, and a round consists
of a quorum, the tensors of all members and a commit (rules in
:mod:`diloco.protocol.manager_rounds`). Keywords for servers are accepted and ignored. After all
members have died, a group resumes from its last saved state.

A step is ``start_quorum`` (which heals a member that is behind), any number of ``allreduce`` calls,
and ``should_commit``, which alone increments the step. No exception propagates out of ``allreduce``
or its ``wait()``: the first one is kept, further calls of the step do nothing, and
``should_commit`` returns False on all members. Each member reduces whole tensors; sharding the
reduction over members is a feature of :func:`diloco.join`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from random import Random
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from diloco.clock import Clock, SystemClock
from diloco.errors import FencedOut
from diloco.protocol.manager_branches import AbandonedBranch
from diloco.protocol.manager_records import Quorum, Vote
from diloco.protocol.manager_rounds import MemberView, counts
from diloco.store.base import Store, StoreError
from diloco.store.retry import RetryingStore
from diloco.torchft import configuration
from diloco.torchft.allreduce_exchange import Exchange, Round, op_name
from diloco.torchft.futures import ExceptionWithTraceback, guarded
from diloco.torchft.peers import MemberOptions
from diloco.torchft.quorum_client import QuorumRequest, Session, process_of
from diloco.torchft.state_transfer import Recovery
from diloco.torchft.step import Mode, Part
from diloco.torchft.work import ManagedWork, skipped

__all__ = [
    "AbandonedBranch",
    "ExceptionWithTraceback",
    "FencedOut",
    "Manager",
    "WorldSizeMode",
]

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 60.0
"""For how long requests are retried while the store is unavailable."""
SWEEP_S = 10.0
"""For how long a shutdown waits until the payloads of the last round are deleted."""


class WorldSizeMode(Enum):
    """The number of replicas in a mean if more than ``min_replica_size`` are present.

    DYNAMIC: all. FIXED_WITH_SPARES: ``min_replica_size``; the others are spares, which receive the
    mean without contributing.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class Manager:
    """One rank of one replica group. The keywords before ``rendezvous`` are torchft's.

    Args:
        pg: optional process group; only its ``errored()`` is used.
        replica_id: permanent name of the replica. A new process with this name replaces an older
            one, which is fenced out.
        rendezvous: URI or store of the group; by default see
            :func:`diloco.torchft.configuration.find_store`.
        join_timeout: for how long a quorum that has enough members waits for further live ones.
        save_every: save the state every so many committed steps, to resume after all members have
            died (0: never).
        coalesce: allreduce calls are uploaded as one object once the caller waits, or once no call
            has arrived for this time.
        majority_guard: require more than half of the healthy replicas in a quorum, and a process
            with the newest committed state if one is alive.
        resume: what a new process loads before its first quorum, unless :meth:`load_state_dict` was
            called. "auto": the newest saved state, if there is one (nothing with ``save_every=0``);
            True: the newest saved state, which must exist unless the group is live; False: nothing.
            Without a saved state and without a live replica to heal from, a rendezvous that was
            used before starts a new branch from this process's state.
    """

    def __init__(
        self,
        pg: object = None,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta = timedelta(seconds=60),
        quorum_timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str = "",
        heartbeat_interval: timedelta = timedelta(seconds=2),
        checkpoint_transport: object = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
        *,
        rendezvous: str | Store | None = None,
        heartbeat_timeout: timedelta | None = None,
        join_timeout: timedelta = timedelta(seconds=60),
        poll_interval: timedelta = timedelta(seconds=1),
        coalesce: timedelta = timedelta(milliseconds=50),
        save_every: int = 10,
        clock: Clock | None = None,
        majority_guard: bool = True,
        resume: bool | Literal["auto"] = "auto",
    ) -> None:
        del connect_timeout, port, hostname, checkpoint_transport, quorum_retries
        if min_replica_size < 1:
            raise ValueError(f"min_replica_size: expected at least 1, found {min_replica_size}")
        self._resume_from = configuration.what_to_resume(resume, save_every)
        rank, world_size = configuration.rank_and_size(rank, world_size)
        name = configuration.name_of_replica(
            replica_id, world_size=world_size, store_addr=store_addr, store_port=store_port
        )
        self._pg = pg
        self._use_async_quorum = use_async_quorum
        self._min_replica_size = min_replica_size
        self._mode = Mode(
            asynchronous=use_async_quorum,
            spares=world_size_mode.name == WorldSizeMode.FIXED_WITH_SPARES.name,  # torchft's too
            min_replica_size=min_replica_size,
            world_size=world_size,
        )
        self._init_sync = init_sync
        self._max_retries = max_retries
        self._timeout_s, self._quorum_timeout_s = configuration.timeouts_s(timeout, quorum_timeout)
        self._poll_interval_s = poll_interval.total_seconds()
        self._coalesce_s = coalesce.total_seconds()
        self._clock: Clock = clock or SystemClock()
        beat_s = heartbeat_interval.total_seconds()
        self._store = RetryingStore(
            configuration.find_store(rendezvous, lighthouse_addr),
            clock=self._clock,
            rng=Random(secrets.randbits(64)),
            deadline_s=min(RETRY_S, self._timeout_s),
        )
        options = MemberOptions(
            replica_id=name,
            rank=rank,
            world_size=world_size,
            heartbeat_interval_s=beat_s,
            heartbeat_timeout_s=(
                heartbeat_timeout.total_seconds() if heartbeat_timeout else max(10.0, 5 * beat_s)
            ),
            join_timeout_s=join_timeout.total_seconds(),
            poll_interval_s=self._poll_interval_s,
            majority_guard=majority_guard,
        )
        nonce = secrets.token_hex(4)
        self._session = Session(self._store, options, nonce=nonce, clock=self._clock)
        self._recovery = Recovery(
            self._session,
            timeout_s=self._timeout_s,
            save_every=save_every,
            own_state=self.state_dict,
            clock=self._clock,
        )
        if load_state_dict and state_dict:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="quorum")
        self._sweeping: Future[None] | None = None
        self._quorum_future: Future[None] | None = None
        self._step = 0
        self._batches_committed = 0
        self._restored = False
        self._commit_failures = 0
        self._errored: ExceptionWithTraceback | None = None
        self._healing = False
        self._participating_replica_rank: int | None = None
        self._participating_replica_world_size = 0
        self._quorum: Quorum | None = None
        self._needed: frozenset[int] = frozenset()
        self._commits_asked = 0
        self._exchange: Exchange | None = None
        self._most_calls = 0

    # -- state -----------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Register a part of the state for healing and saving: plain values and tensors."""
        self._recovery.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """torchft's older name for :meth:`register_state_dict_fn`."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Allow reads of the state again."""
        self._recovery.allow_read()

    def disallow_state_dict_read(self) -> None:
        """Block reads of the state until :meth:`allow_state_dict_read`, because it changes."""
        self._recovery.disallow_read()

    def state_dict(self) -> dict[str, int]:
        """Return the Manager's counts, for a checkpoint."""
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore the counts of a checkpoint; the group's saved state is then not loaded."""
        self._count_from(state_dict)
        self._recovery.forget()
        self._restored = True

    def _count_from(self, state_dict: Mapping[str, int]) -> None:
        self._step = state_dict["step"]
        self._batches_committed = state_dict["batches_committed"]

    def _manager_state_dict(self) -> dict[str, Any]:
        return self._recovery.state()

    # -- errors ----------------------------------------------------------------------------------

    def report_error(self, e: Exception) -> None:
        """Record an error; the step will not be committed. The first error of a step is kept."""
        if self._errored is None:
            log.error("step %d failed: %s", self._step, e, exc_info=e)
            self._errored = ExceptionWithTraceback(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step."""
        return self._errored

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that completes with ``default`` if ``fut`` fails or times out, which is
        reported as an error."""
        timeout_s = timeout.total_seconds() if timeout else self._timeout_s
        return guarded(fut, default, timeout_s=timeout_s, report=self.report_error)

    # -- quorum ----------------------------------------------------------------------------------

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Begin a step: form a quorum, and heal if this member is behind.

        A synchronous quorum is complete on return. With an asynchronous one, a healing member
        contributes zeros and loads its state in :meth:`should_commit`. All members must pass the
        same ``allow_heal``.

        Raises :class:`TimeoutError`, and :class:`FencedOut` if a newer process uses this
        ``replica_id``; with an asynchronous quorum, any method that waits for it raises them.
        """
        if self._quorum_future is not None:
            concurrent.futures.wait([self._quorum_future])
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None
        if self._healing:  # should_commit was not called; the counts are already the source's
            self._recovery.apply()
        self._errored = None
        self._healing = False
        self._quorum = None
        if allow_heal and not self._restored:
            self._restored = True
            if self._step == 0:
                own = self._recovery.resume_before_first_quorum(self._resume_from)
                if own is not None:
                    self._count_from(own)
        timeout_s = timeout.total_seconds() if timeout else self._quorum_timeout_s
        self._quorum_future = self._executor.submit(
            self._take_quorum, allow_heal, shrink_only, timeout_s
        )
        if not self._use_async_quorum:
            self.wait_quorum()
            if self._healing:
                self._recovery.apply()
                self._healing = False

    def wait_quorum(self) -> None:
        """Wait until the quorum of this step is complete."""
        if self._quorum_future is None:
            raise RuntimeError("expected start_quorum before this call, found no quorum")
        self._quorum_future.result()

    def _take_quorum(self, allow_heal: bool, shrink_only: bool, timeout_s: float) -> None:
        asking = QuorumRequest(
            step=self._step,
            min_replicas=self._min_replica_size,
            init_sync=self._init_sync,
            shrink_only=shrink_only,
            allow_heal=allow_heal,
            mode=str(self._mode),
            branch=self._recovery.branch,
            head=self._recovery.head,
        )
        quorum = self._session.join(asking, timeout_s=timeout_s)
        part = self._mode.part(quorum, self._session.me.replica, allow_heal=allow_heal)
        self._participating_replica_rank = part.rank
        self._participating_replica_world_size = part.size
        self._needed = part.needed
        self._commits_asked = 0
        self._exchange = self._new_exchange(quorum, part)
        self._quorum = quorum
        if allow_heal:
            self._recover(quorum, part.standing)
        elif part.standing.seat.newest:
            self._recovery.branch, self._recovery.head = quorum.branch, quorum.head

    def _recover(self, quorum: Quorum, place: MemberView) -> None:
        """Send, save or receive the state as the quorum requires. A TypeError (a state that cannot
        be serialised) is an error of the caller and propagates."""
        try:
            self._healing = place.heals
            own = self._recovery.recover(quorum, place)
            if own is not None:
                self._count_from(own)
        except (TypeError, FencedOut):
            raise
        except Exception as error:
            self.report_error(error)

    def _new_exchange(self, quorum: Quorum, part: Part) -> Exchange:
        round = Round(
            n=quorum.n,
            me=self._session.me,
            contributors=tuple(process_of(seat) for seat in part.standing.contributors),
            divisor=part.size,
            timeout_s=self._timeout_s,
            coalesce_s=self._coalesce_s,
            expected_calls=self._most_calls,
        )
        return Exchange(
            self._store,
            round,
            clock=self._clock,
            poll_interval_s=self._poll_interval_s,
            why_lost=lambda member: self._session.why_lost(quorum.n, member),
            report=self.report_error,
        )

    # -- allreduce -------------------------------------------------------------------------------

    def allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: object = ReduceOp.AVG
    ) -> ManagedWork:
        """Start reducing ``tensor`` (any device and shape) over the participants, in place.

        The tensor has its result once the returned Work has been awaited. All members make the same
        calls in the same order. ``should_quantize`` sends floats as int8. ``reduce_op`` is a torch
        ReduceOp or its name: AVG (floats only), SUM, MIN, MAX, PRODUCT. The tensor of a member that
        does not participate is set to zero and not sent.
        """
        if self._errored is not None:
            return skipped(tensor, self.report_error)
        self.wait_quorum()
        op = op_name(reduce_op)
        if op == "avg" and not tensor.is_floating_point():
            raise ValueError(
                f"average reduce op is only supported for floating point tensors, "
                f"found {tensor.dtype}"
            )
        if not self.is_participating():
            tensor.detach().zero_()
        if self._exchange is None:  # should_commit was already called
            self.report_error(RuntimeError("expected start_quorum before allreduce"))
            return skipped(tensor, self.report_error)
        return self._exchange.begin(tensor, op=op, quantise=should_quantize)

    # -- commit ----------------------------------------------------------------------------------

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step. Returns True, on all members alike, if all required members succeeded.

        Raises :class:`RuntimeError` after more than ``max_retries`` consecutive failures.
        """
        self.wait_quorum()
        quorum = self._quorum
        assert quorum is not None
        errored = getattr(self._pg, "errored", None)
        if callable(errored) and isinstance(error := errored(), Exception):
            self.report_error(error)
        if self._exchange is not None:
            self._most_calls = max(self._most_calls, self._exchange.calls)
            self._exchange.finish(lambda: self._errored is not None)
            self._exchange = None
        if self._healing:
            self._apply_healed()
        enough = self.num_participants() >= self._min_replica_size
        error_text = str(self._errored.original_exception) if self._errored else ""
        vote = Vote(
            member=self._session.me.replica,
            incarnation=self._session.me.incarnation,
            ok=enough and self._errored is None,
            error=error_text or ("" if enough else "not enough replicas participate"),
        )
        decision = self._session.agree(
            quorum,
            vote,
            c=self._commits_asked,
            needed=self._needed,
            timeout_s=timeout.total_seconds() if timeout else self._timeout_s,
        )
        if not decision.closed:
            self._commits_asked += 1
        me = self._session.me.replica
        committed = counts(quorum, decision, needed=self._needed, member=me)
        log.info("step %d %s", self._step, "is committed" if committed else "is not committed")
        if decision.closed:
            log.warning("round %d was closed without this process: its step is discarded", quorum.n)
        if quorum.seats[0].member == me and self._commits_asked == 1:
            self._sweeping = self._executor.submit(self._sweep, quorum.n - 1)
        if committed:
            self._recovery.committed(quorum)
            self._step += 1
            self._batches_committed += self.num_participants()
            self._commit_failures = 0
            return True
        self._commit_failures += 1
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise RuntimeError(
                f"should_commit failed {self._commit_failures} times consecutively, "
                f"exceeding max_retries={self._max_retries}"
            )
        return False

    def _sweep(self, n: int) -> None:
        try:
            self._session.records.sweep(n)
        except StoreError as error:
            log.warning("could not sweep round %d, the next sweep will retry: %s", n, error)

    def _apply_healed(self) -> None:
        if not self._recovery.apply() and self._errored is None:
            self.report_error(RuntimeError("expected a state to heal from, found none"))

    # -- the current step ------------------------------------------------------------------------

    def current_step(self) -> int:
        """Return the number of committed steps."""
        return self._step

    def batches_committed(self) -> int:
        """Return the sum of the participants over all committed steps."""
        return self._batches_committed

    def num_participants(self) -> int:
        """Return the number of replicas in the mean of this step; 0 before the first quorum."""
        if self._quorum_future is None:
            return 0
        self.wait_quorum()
        return self._participating_replica_world_size

    def participating_rank(self) -> int | None:
        """Return this replica's rank among the participants; None if it is healing or a spare."""
        if self._quorum_future is None:
            return None
        self.wait_quorum()
        return self._participating_replica_rank

    def is_participating(self) -> bool:
        """Return whether this replica contributes to the means of this step."""
        return self._participating_replica_rank is not None and not self._healing

    def shutdown(self, wait: bool = True) -> None:
        """Leave the group at once, so that the others do not wait for a timeout."""
        if self._exchange is not None:
            self._exchange.abandon()
        self._session.end()
        if wait and self._sweeping is not None:
            concurrent.futures.wait([self._sweeping], timeout=SWEEP_S)
        self._executor.shutdown(wait=wait, cancel_futures=True)
