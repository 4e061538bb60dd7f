"""``python -m diloco.syncer URI``: a process that reduces for everybody, in the bucket's region.

A syncer trains nothing and needs no GPU and no model: it reads every payload of a round, stores
their mean once, and commits. Each replica then uploads one payload and downloads one mean, which is
the least traffic out of the region. It takes a lease like a replica (its number must be free), so
that planners see whether it is there; a round it does not finish is finished by the replicas.

Exit codes are those of :mod:`diloco.replica`.
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import signal
import sys
import threading
from collections.abc import Sequence

from diloco.clock import Clock, SystemClock
from diloco.errors import Leaving, RoundTimeout, RunOver
from diloco.exchange.reduce import CannotReduce
from diloco.exchange.round_exchange import Exchange, Timings
from diloco.exchange.round_observer import Base, Sight
from diloco.exit_codes import EX_TERMINATED, exit_code_of
from diloco.membership.lease import SYNCER, Lease, Observer, claim_incarnation, patiently
from diloco.model.fragments import Slot, Table
from diloco.protocol.reading import Damaged
from diloco.protocol.records import CheckpointManifest, Commit
from diloco.store.base import Store, StoreError
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore
from diloco.training.checkpoint import newest_manifest, read_final
from diloco.training.initial_state import read_document
from diloco.versions import add_version

log = logging.getLogger(__name__)

POLL_S = 0.5


class Syncer:
    """Follows the log of a group and reduces the rounds whose plans name it."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        heartbeat_interval_s: float | None = None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        rng = random.Random(secrets.randbits(64))
        self._store = RetryingStore(store, clock=self._clock, rng=rng, deadline_s=60.0)
        document = patiently(
            lambda: read_document(self._store, clock=self._clock), clock=self._clock
        )
        self._settings = document.settings
        number = self._settings.max_replicas
        identity = patiently(
            lambda: claim_incarnation(self._store, number, nonce=secrets.token_hex(4)),
            clock=self._clock,
        )
        self._lease = Lease(
            RetryingStore(
                store,
                clock=SystemClock(),
                rng=rng,
                deadline_s=10.0,
                permitted=self._store.permitted,
            ),
            identity,
            clock=self._clock,
            interval_s=heartbeat_interval_s or min(2.0, self._settings.heartbeat_timeout_s / 5),
            heartbeat_timeout_s=self._settings.heartbeat_timeout_s,
            device="cpu",
            role=SYNCER,
            on_drain=lambda within_s, reason: self.leave(),
        )
        self._leave = threading.Event()
        self.left = False

    def leave(self) -> None:
        """Ask it to end after what it is doing. Safe in a signal handler."""
        self._leave.set()

    def run(self) -> None:
        """Serve until the run is over or stopped, or :meth:`leave`."""
        state, message = "done", ""
        try:
            self._lease.start(check=self._check)
            self._serve()
        except Leaving as leaving:
            log.info("the syncer ends: %s", leaving)
            state, self.left = "left", str(leaving) == "left"
        except BaseException as error:
            state, message = "failed", str(error)
            raise
        finally:
            try:
                self._lease.end(state, message)
            except StoreError as error:
                log.error("the last beat is not written: %s", error)

    def _serve(self) -> None:
        manifest = self._await_model()
        table = Table(
            [
                Slot(
                    name=t.name, shape=t.shape, dtype=t.dtype, embedding=t.embedding,
                    numel=_product(t.shape),
                )
                for t in manifest.tensors
            ],
            fragments=self._settings.num_fragments,
            pattern=self._settings.fragment_pattern,
        )  # fmt: skip
        sight = Sight(
            self._store,
            self._lease.identity,
            self._settings,
            observer=Observer(
                self._store, clock=self._clock, timeout_s=self._settings.heartbeat_timeout_s
            ),
            model_hash=manifest.model_hash,
            table=table,
            committer=lambda: None if self._store.atomic_create else self._lease.committer,
        )
        exchange = Exchange(
            self._store,
            self._lease.identity,
            self._settings,
            clock=self._clock,
            sight=sight,
            check=self._check,
            place=lambda: self._settings.max_replicas,  # planning is the replicas' business
            on_wait=lambda why: self._lease.update(message=why),
        )
        round = 1
        while True:
            try:
                commit = sight.commit_of(round) or self._settle(exchange, round)
                if commit is None or commit.last:
                    return
            except (Damaged, CannotReduce) as error:
                # It is decided all the same; the replicas see to what cannot be read of it.
                log.error("round %d is passed over: %s", round, error)
            round += 1
            self._lease.update(round=round)
            sight.forget_before(round)

    def _settle(self, exchange: Exchange, round: int) -> Commit | None:
        """One round's commit; None when the run is over."""
        self._lease.update(state="waiting", round=round)
        while True:
            try:
                # Its base is nobody's: it only ever acts once there is a plan.
                settled = exchange.settle(
                    round, base=Base(round=-1, digest=""), sent=None, timings=Timings(self._clock)
                )
            except RunOver:
                return None
            except RoundTimeout:
                if read_final(self._store) is not None:
                    return None
                continue  # a run that stands still needs its syncer when it goes on
            return settled.commit

    def _await_model(self) -> CheckpointManifest:
        """A checkpoint's manifest, which has the names and shapes of the tensors."""
        while True:
            if (manifest := newest_manifest(self._store)) is not None:
                return manifest
            self._check()
            self._clock.sleep(POLL_S)

    def _check(self) -> None:
        self._lease.check_fence()
        if self._lease.stop_requested:
            raise Leaving("stopped")
        if self._leave.is_set():
            raise Leaving("left")


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.syncer",
        description="Reduce for all replicas of a run, next to its bucket.",
    )
    add_version(parser)
    parser.add_argument("uri", help="rendezvous URI of the run")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return exit_code_of(lambda: _run(options.uri))


def _run(uri: str) -> int:
    syncer = Syncer(open_store(uri))
    signal.signal(signal.SIGTERM, lambda *_: syncer.leave())
    signal.signal(signal.SIGINT, lambda *_: syncer.leave())
    syncer.run()
    return EX_TERMINATED if syncer.left else 0


if __name__ == "__main__":
    sys.exit(main())
