"""The store operations of one round: contribute, settle, replay.

``contribute`` uploads the payload, then the record that names it (invariant I2). ``settle`` waits
for the round's commit (:mod:`diloco.exchange.round_settlement`). ``replay`` computes the mean of a
round that was committed without this replica. With overlap several rounds are settled at once, each
in its own thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from torch import Tensor

from diloco.clock import Clock
from diloco.exchange.exchange_context import ExchangeContext
from diloco.exchange.payload import PayloadInfo, digest_of, norms_of
from diloco.exchange.payloads_ahead import read_ahead
from diloco.exchange.reduce import CannotReduce, Merged, Own
from diloco.exchange.round_observer import Base, RoundObserver
from diloco.exchange.round_settlement import (
    DAMAGE_PATIENCE_S,
    ContributionLost,
    RoundResult,
    RoundSettlement,
    Sent,
    compare_digests,
)
from diloco.exchange.step_accounting import LocalWork
from diloco.exchange.team import OneProcess, Team, UploadedPart
from diloco.exchange.timings import Timings
from diloco.membership.lease import Lease
from diloco.protocol import keys
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit, ContributionRecord, Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store
from diloco.store.daemon import call_in_daemon

__all__ = ["DAMAGE_PATIENCE_S", "ContributionLost", "Exchange", "RoundResult", "Sent", "Timings"]

log = logging.getLogger(__name__)


class Exchange:
    """One process's part in every round.

    ``check`` is called while waiting, and raises to end the exchange (stop, fence). The ``team``
    does the work, by default this process alone.
    """

    def __init__(
        self,
        store: Store,
        settings: GroupSettings,
        *,
        lease: Lease,
        round_observer: RoundObserver,
        clock: Clock,
        check: Callable[[], None],
        team: Team | None = None,
    ) -> None:
        self._store = store
        self._round_observer = round_observer
        self._clock = clock
        self._attempts = itertools.count(1)
        self._context = ExchangeContext(
            store=store,
            settings=settings,
            clock=clock,
            lease=lease,
            round_observer=round_observer,
            check=check,
            team=team or OneProcess(store, settings, clock),
        )

    def contribute(
        self,
        round: int,
        *,
        base: Base,
        model_hash: str,
        vector: Tensor,
        work: LocalWork,
        rounds_here: int,
        timings: Timings,
        settles: bool = False,
    ) -> Sent:
        """Upload ``vector`` (n,) fp32, the pseudo-gradient of the fragment, or of a slice of
        it, while it is being encoded, then its record. Raises
        :class:`~diloco.store.base.StoreError`.

        If the caller ``settles`` the round next, the payload is read back and the others' are read
        ahead in the background. Otherwise the payload is read back before the record is written.
        """
        identity = self._round_observer.identity
        slots = self._round_observer.slots(round)
        info = PayloadInfo(
            round=round,
            fragment=self._round_observer.fragment(round),
            replica=identity.replica,
            incarnation=identity.incarnation,
            codec=self._context.settings.codec,
            numel=slots[-1].stop - slots[0].offset,
            attempt=next(self._attempts),
        )
        where = (round, identity.replica, identity.incarnation)
        with timings.measure("upload"):
            parts = self._context.team.upload(info, vector, slots)
        encode_s = max(part.encode_s for part in parts)
        timings.add("upload", -encode_s)
        timings.add("encode", encode_s)
        norms = norms_of([square for part in parts for square in part.squares], len(slots))
        digest = digest_of(info, "".join(part.checksums for part in parts))
        record = ContributionRecord(
            round=info.round,
            fragment=info.fragment,
            base_round=base.round,
            base_digest=base.digest,
            replica=info.replica,
            incarnation=info.incarnation,
            model_hash=model_hash,
            codec=info.codec,
            numel=info.numel,
            tokens=work.tokens,
            new_tokens=work.new_tokens,
            steps=work.steps,
            rounds=work.rounds,
            loss=work.loss,
            norm=sum(norm * norm for norm in norms) ** 0.5,
            norms=norms,
            size_bytes=sum(part.size_bytes for part in parts),
            digest=digest,
            compute_s=work.compute_s,
            encode_s=encode_s,
            rounds_here=rounds_here,
            slices=len(parts),
            attempt=info.attempt,
            wall_s=self._clock.wall(),
        )
        own = Own(identity=identity, digest=digest, vector=vector, body=parts[0].body)
        with timings.measure("upload"):
            checking = _verified(round, parts, in_background=settles)
        if settles and len(parts) == 1:
            last = self._round_observer.known_plan_before(round)
            ahead = read_ahead(
                self._store, self._context.settings, last, info, own, timings=timings
            )
            own = replace(own, ahead=ahead)
        sent = Sent(record=record, own=own, checking=checking)
        try:
            with timings.measure("upload"):
                self._store.put(keys.contribution_record(*where), record.to_bytes())
        except BaseException:
            sent.close()
            raise
        return sent

    def replay(self, commit: Commit) -> Merged | None:
        """Return the merged mean of a round that was committed without this replica; None if void.

        Raises :class:`CannotReduce` if its plan or its payloads cannot be read.
        """
        if commit.void:
            return None
        try:
            plan = self._round_observer.plan_of(commit.round)
        except Damaged as error:
            raise CannotReduce(None, str(error)) from None
        if plan is None:
            raise CannotReduce(None, f"{keys.plan(commit.round)} is missing")
        merged = self._context.reduction(plan, Timings(self._clock)).committed(commit)
        compare_digests(commit, merged)
        return merged

    def settle(
        self,
        round: int,
        *,
        base: Base,
        sent: Sent | None,
        timings: Timings,
        earlier: Identity | None = None,
    ) -> RoundResult:
        """Wait for the round's commit, and do what the round needs if no other replica does.

        ``earlier`` is the process of this replica that contributed, if this one did not.

        Raises :class:`ContributionLost` if its record cannot be read while there is no plan,
        :class:`~diloco.errors.RoundTimeout` after ``round_timeout_s`` (excluding the time below
        quorum, as far as this process has observed it), :class:`~diloco.errors.RunOver` if an
        earlier round was the last, :class:`CannotReduce` if a committed round cannot be read here,
        and any exception of ``check``.
        """
        settlement = RoundSettlement(
            self._context, round, base=base, sent=sent, timings=timings, earlier=earlier
        )
        try:
            return settlement.run()
        finally:
            settlement.close()


def _verified(round: int, parts: Sequence[UploadedPart], *, in_background: bool) -> Future[str]:
    """Read the objects of a payload back; the result describes the damage that remains."""

    def verify() -> str:
        damage = "; ".join(filter(None, [part.verify() for part in parts]))
        if damage:
            log.error("round %d: the store damages this replica's payload: %s", round, damage)
        return damage

    if in_background:
        with contextlib.suppress(RuntimeError):  # the system starts no thread
            return call_in_daemon(verify, name="verify_upload")
    checked: Future[str] = Future()
    checked.set_result(verify())
    return checked
