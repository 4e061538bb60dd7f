"""A Manager shaped like torchft's (0.2.0), over an object store: change the import, name a bucket.

::

    manager = Manager(
        load_state_dict=load, state_dict=save, min_replica_size=2, use_async_quorum=False,
        replica_id="island-3", rendezvous="s3://bucket/run",
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=500): ...   # torchft's own

torchft's DiLoCo, LocalSGD, OptimizerWrapper and DistributedDataParallel run on it unchanged. There
is no lighthouse, no process group and no TCP store: members meet in the store, a round is a quorum,
everybody's tensors and a commit (:mod:`diloco.protocol.manager_rounds` has the rules), and the
keywords that name servers are accepted and not used. After everyone has died a group resumes from
its last saved state.

A step: ``start_quorum`` (which heals a member that is behind), any number of ``allreduce``,
``should_commit``. Only ``should_commit`` raises the step. An error never propagates out of an
``allreduce`` or its ``wait()``: it is kept, further calls of the step do nothing, and
``should_commit`` is False for everybody. What it leaves out: sharding the sum over the members,
which :func:`diloco.join` has.
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
from diloco.errors import FencedOut, ReplicaError
from diloco.protocol.manager_branches import AbandonedBranch
from diloco.protocol.manager_records import Quorum, Seat, Vote
from diloco.protocol.manager_rounds import Standing, counts
from diloco.protocol.records import Identity
from diloco.store.base import Store, StoreError
from diloco.store.retry import RetryingStore
from diloco.torchft import configuration
from diloco.torchft.allreduce_exchange import OPS, Exchange, Round
from diloco.torchft.futures import ExceptionWithTraceback, guarded
from diloco.torchft.quorum_client import Asking, Session
from diloco.torchft.state_transfer import Recovery
from diloco.torchft.step import Calls, Mode, Part, nothing_to_do
from diloco.torchft.work import ManagedWork

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
"""How long a store that does not answer is tried again."""
SWEEP_S = 10.0
"""How long a shutdown waits for what was exchanged last to be deleted."""


class WorldSizeMode(Enum):
    """Over how many replicas a mean is taken when more than ``min_replica_size`` are there.

    DYNAMIC: over all. FIXED_WITH_SPARES: over ``min_replica_size``; the others are spares, which
    contribute nothing and receive the mean.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class Manager:
    """One rank of one replica group. The keywords before ``rendezvous`` are torchft's.

    ``pg`` is asked only whether it has ``errored()``. ``replica_id`` names the replica for ever: a
    process started again under it takes its place, and an older one that still runs is refused.
    ``rendezvous`` is a URI or a store; where it is missing, see
    :func:`diloco.torchft.configuration.find_store`. ``join_timeout`` is how long a quorum waits for
    live members once enough are there; ``save_every`` committed steps the state is saved, to resume
    from after everyone has died (0: never); allreduce calls are sent as one object once somebody
    waits for one or none has come for ``coalesce``.

    ``majority_guard``: a quorum needs more than half of the healthy replicas, and one that holds
    the newest committed state if any such process lives. ``resume``: what a new process does
    before its first quorum, unless :meth:`load_state_dict` was called: "auto" loads the newest
    saved state where there is one, and nothing with ``save_every=0``; True expects one, unless the
    group is at work; False never loads one. Without one, and with no live replica to heal from, a
    rendezvous that was used before begins a new branch at this process's own state.
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
        self._session = Session(
            self._store,
            replica_id=name,
            rank=rank,
            world_size=world_size,
            nonce=secrets.token_hex(4),
            clock=self._clock,
            heartbeat_interval_s=beat_s,
            heartbeat_timeout_s=(
                heartbeat_timeout.total_seconds() if heartbeat_timeout else max(10.0, 5 * beat_s)
            ),
            join_timeout_s=join_timeout.total_seconds(),
            poll_interval_s=self._poll_interval_s,
            majority_guard=majority_guard,
        )
        self._recovery = Recovery(
            self._session,
            ranks=world_size,
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
        self._calls: Calls | None = None
        self._most_calls = 0

    # -- state -----------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add to what a healing member takes and what is saved: plain values and tensors."""
        self._recovery.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """torchft's older name for :meth:`register_state_dict_fn`."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        self._recovery.allow_read()

    def disallow_state_dict_read(self) -> None:
        """Nobody's state is read until :meth:`allow_state_dict_read`: it is being changed."""
        self._recovery.disallow_read()

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Take up the step counts of a checkpoint; the group's own saved state is then not
        looked for."""
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
        """Say that something went wrong: the step will not be committed. The first one counts."""
        if self._errored is None:
            log.error("step %d fails: %s", self._step, e, exc_info=e)
            self._errored = ExceptionWithTraceback(e)

    def errored(self) -> ExceptionWithTraceback | None:
        return self._errored

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """A future that ends with ``default`` where ``fut`` fails or takes too long, which is
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
        """Begin a step: find out who is in it, and heal if this member is behind.

        With a synchronous quorum that is done on return; otherwise a healing member contributes
        zeros and takes its state in :meth:`should_commit`. All must pass the same ``allow_heal``.
        Raises :class:`TimeoutError`, and :class:`FencedOut` where a newer process has this one's
        ``replica_id`` (an asynchronous quorum: wherever it is waited for).
        """
        if self._quorum_future is not None:
            concurrent.futures.wait([self._quorum_future])
        if self._calls is not None:
            self._calls.abandon()
            self._calls = None
        if self._healing:  # should_commit was not called: the step counts are the source's already
            self._recovery.apply()
        self._errored = None
        self._healing = False
        self._quorum = None
        if allow_heal and not self._restored:
            self._resume()
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
        if self._quorum_future is None:
            raise RuntimeError("expected start_quorum before this call, found no quorum")
        self._quorum_future.result()

    def _resume(self) -> None:
        """Before a new process's first quorum: load what its group last saved, as ``resume``
        says."""
        self._restored = True
        if self._step != 0:
            return
        if self._resume_from is not False and (own := self._recovery.resume()) is not None:
            self._count_from(own)
            return
        if self._resume_from is True and (self._session.n == 0 or self._session.others_gone()):
            raise ReplicaError(
                f"resume=True: expected a saved state of {self._session.world_size} ranks in "
                f"{self._store.uri}, found none. Pass resume='auto' to start without one"
            )
        if self._session.n > 0:
            log.warning(
                "%s has been used before: its last round was %d, at step %d. No saved state is "
                "loaded (resume=%r): this process heals from a live replica, or a new branch "
                "begins at its own state",
                self._store.uri,
                self._session.n,
                self._session.quorum.step if self._session.quorum else 0,
                self._resume_from,
            )

    def _take_quorum(self, allow_heal: bool, shrink_only: bool, timeout_s: float) -> None:
        asking = Asking(
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
        self._calls = Calls(self._new_exchange(quorum, part), self.report_error)
        self._quorum = quorum
        if allow_heal:
            self._recover(quorum, part.standing)
        elif part.standing.seat.newest:
            self._recovery.branch, self._recovery.head = quorum.branch, quorum.head

    def _recover(self, quorum: Quorum, place: Standing) -> None:
        """Hand this member's state to those who need it, or take one. TypeError is the caller's
        mistake (a state that cannot travel) and propagates."""
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
            contributors=tuple(_process(seat) for seat in part.standing.contributors),
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
            why_lost=lambda who: self._session.why_lost(quorum.n, who),
        )

    # -- allreduce -------------------------------------------------------------------------------

    def allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: object = ReduceOp.AVG
    ) -> ManagedWork:
        """Begin to replace ``tensor`` (any device and shape) by its mean or sum over the
        participants; it has it when the Work returned has been waited for.

        All members make the same calls in the same order. ``should_quantize`` sends floats as
        int8. ``reduce_op`` is torch's, or the name of one: AVG (floats only), SUM, MIN, MAX,
        PRODUCT. A member that does not participate gives nothing; its tensor is zeroed until then.
        """
        if self._errored is not None:
            return nothing_to_do(tensor, self.report_error)
        self.wait_quorum()
        op = op_name(reduce_op)
        if op == "avg" and not tensor.is_floating_point():
            raise ValueError(
                f"average reduce op is only supported for floating point tensors, "
                f"found {tensor.dtype}"
            )
        if not self.is_participating():
            tensor.detach().zero_()
        if self._calls is None:  # the step has been committed already
            self.report_error(RuntimeError("expected start_quorum before allreduce"))
            return nothing_to_do(tensor, self.report_error)
        return self._calls.begin(tensor, op=op, quantise=should_quantize)

    # -- commit ----------------------------------------------------------------------------------

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step: True, for all alike, if everyone who was counted on came through.

        Raises :class:`RuntimeError` after more than ``max_retries`` failures in a row.
        """
        self.wait_quorum()
        quorum = self._quorum
        assert quorum is not None
        errored = getattr(self._pg, "errored", None)
        if callable(errored) and isinstance(error := errored(), Exception):
            self.report_error(error)
        if self._calls is not None:
            self._most_calls = max(self._most_calls, self._calls.made)
            self._calls.finish(lambda: self._errored is not None)
            self._calls = None
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
        verdict = self._session.agree(
            quorum,
            vote,
            c=self._commits_asked,
            needed=self._needed,
            timeout_s=timeout.total_seconds() if timeout else self._timeout_s,
        )
        if not verdict.closed:
            self._commits_asked += 1
        me = self._session.me.replica
        committed = counts(quorum, verdict, needed=self._needed, member=me)
        log.info("step %d %s", self._step, "is committed" if committed else "is not committed")
        if verdict.closed:
            log.warning("round %d went on without this process: its step is discarded", quorum.n)
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
        """What cannot be deleted now is found by the next sweep."""
        try:
            self._session.sweep(n)
        except StoreError as error:
            log.warning("round %d could not be swept, the next sweep tries again: %s", n, error)

    def _apply_healed(self) -> None:
        if not self._recovery.apply() and self._errored is None:
            self.report_error(RuntimeError("expected a state to heal from, found none"))

    # -- what a step is --------------------------------------------------------------------------

    def current_step(self) -> int:
        return self._step

    def batches_committed(self) -> int:
        """Participants of all committed steps, added up."""
        return self._batches_committed

    def num_participants(self) -> int:
        """Replicas of this step's quorum that a mean is taken over; 0 before the first."""
        if self._quorum_future is None:
            return 0
        self.wait_quorum()
        return self._participating_replica_world_size

    def participating_rank(self) -> int | None:
        """This replica's place among them; None for one that is behind, or a spare."""
        if self._quorum_future is None:
            return None
        self.wait_quorum()
        return self._participating_replica_rank

    def is_participating(self) -> bool:
        return self._participating_replica_rank is not None and not self._healing

    def shutdown(self, wait: bool = True) -> None:
        """Leave the group; the others need not wait for a timeout to notice."""
        if self._calls is not None:
            self._calls.abandon()
        self._session.end()
        if wait and self._sweeping is not None:
            concurrent.futures.wait([self._sweeping], timeout=SWEEP_S)
        self._executor.shutdown(wait=wait, cancel_futures=True)


def op_name(reduce_op: object) -> str:
    """The lower-case name of torch's ReduceOp, of a member of its enumeration, or of a string."""
    name = reduce_op.lower() if isinstance(reduce_op, str) else ""
    for op in OPS:
        if name == op or (not name and reduce_op == getattr(ReduceOp, op.upper())):
            return op
    raise ValueError(f"reduce_op: expected one of {sorted(OPS)}, found {reduce_op!r}")


def _process(seat: Seat) -> Identity:
    return Identity(replica=seat.member, incarnation=seat.incarnation)
