"""``python -m diloco.syncer URI``: reduce the rounds of a run for all replicas.

A syncer runs in the region of the bucket. It trains nothing and needs neither a GPU nor the model:
it reads all payloads of a round, stores their mean and commits the round. Each replica then uploads
one payload and downloads one mean, which minimises the traffic out of the region. The syncer holds
a lease like a replica, so that replicas include it in their plans only while it is alive. Rounds
that it does not finish are finished by the replicas.

For the exit codes, see :mod:`diloco.exit_codes`.
"""

from __future__ import annotations

from diloco.errors import without_module

try:
    import torch  # noqa: F401
except ModuleNotFoundError as missing:
    raise without_module(missing, "torch", caller=__name__) from None

import argparse
import logging
import math
import random
import secrets
import signal
import threading
from collections.abc import Sequence

from diloco.clock import Clock, SystemClock
from diloco.command_line import add_common_options
from diloco.errors import RoundTimeout, RunOver, StopReason, StopTraining
from diloco.exchange.reduce import CannotReduce
from diloco.exchange.round_exchange import Exchange, Timings
from diloco.exchange.round_observer import Base, RoundObserver
from diloco.exit_codes import EX_TERMINATED, end_process, exit_code_of
from diloco.membership.lease import Lease, claim_incarnation, patiently
from diloco.membership.observer import SYNCER, Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol.control_pace import default_interval_s
from diloco.protocol.reading import Damaged
from diloco.protocol.records import CheckpointManifest, Commit
from diloco.store.base import Store, StoreError
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore
from diloco.training.checkpoint import newest_manifest
from diloco.training.final_result import read_final
from diloco.training.initial_state import read_document

log = logging.getLogger(__name__)

POLL_S = 0.5


class Syncer:
    """Follows the rounds of a group and reduces those whose plans name this process."""

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
            interval_s=heartbeat_interval_s
            or default_interval_s(self._settings.heartbeat_timeout_s),
            heartbeat_timeout_s=self._settings.heartbeat_timeout_s,
            device="cpu",
            role=SYNCER,
            on_drain=lambda within_s, reason: self.leave(),
        )
        self._leave = threading.Event()
        self.left = False

    def leave(self) -> None:
        """Request an end at the next check. Safe in a signal handler."""
        self._leave.set()

    def run(self) -> None:
        """Reduce rounds until the run ends or is stopped, or until :meth:`leave` is called."""
        state, message = "done", ""
        try:
            self._lease.start(check=self._check)
            self._serve()
        except StopTraining as stop:
            log.info("syncer stops: %s", stop)
            state, self.left = "left", stop.reason == StopReason.LEFT
        except BaseException as error:
            state, message = "failed", str(error)
            raise
        finally:
            try:
                self._lease.end(state, message)
            except StoreError as error:
                log.error("could not write the last heartbeat: %s", error)

    def _serve(self) -> None:
        manifest = self._await_model()
        table = Table(
            [
                Slot(
                    name=t.name,
                    shape=t.shape,
                    dtype=t.dtype,
                    embedding=t.embedding,
                    numel=math.prod(t.shape),
                )
                for t in manifest.tensors
            ],
            fragments=self._settings.num_fragments,
            pattern=self._settings.fragment_pattern,
        )
        round_observer = RoundObserver(
            self._store,
            self._settings,
            lease=self._lease,
            observer=Observer(
                self._store,
                clock=self._clock,
                timeout_s=self._settings.heartbeat_timeout_s,
                unretried=self._store.inner,
            ),
            model_hash=manifest.model_hash,
            table=table,
        )
        exchange = Exchange(
            self._store,
            self._settings,
            lease=self._lease,
            round_observer=round_observer,
            clock=self._clock,
            check=self._check,
        )
        round = 1
        while True:
            try:
                commit = round_observer.commit_of(round) or self._settle(exchange, round)
                if commit is None or commit.last:
                    return
            except (Damaged, CannotReduce) as error:
                # The round is committed; the replicas recover from what cannot be read.
                log.error("round %d is skipped: %s", round, error)
            round += 1
            self._lease.update(round=round)
            round_observer.forget_before(round)

    def _settle(self, exchange: Exchange, round: int) -> Commit | None:
        """Return the commit of one round, or None if the run has ended."""
        self._lease.update(state="waiting", round=round)
        while True:
            try:
                # No contribution matches this base: a syncer acts only once there is a plan.
                settled = exchange.settle(
                    round, base=Base(round=-1, digest=""), sent=None, timings=Timings(self._clock)
                )
            except RunOver:
                return None
            except RoundTimeout:
                if read_final(self._store) is not None:
                    return None
                continue  # the run has paused, and will need its syncer when it continues
            return settled.commit

    def _await_model(self) -> CheckpointManifest:
        """Wait for a checkpoint; its manifest has the names and shapes of the tensors."""
        self._lease.update(message="waiting for checkpoint 0")
        while True:
            if (manifest := newest_manifest(self._store)) is not None:
                return manifest
            self._check()
            self._clock.sleep(POLL_S)

    def _check(self) -> None:
        self._lease.check_fence()
        if self._lease.stop_requested:
            raise StopTraining(StopReason.STOPPED)
        if self._leave.is_set():
            raise StopTraining(StopReason.LEFT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.syncer",
        description="Reduce the rounds of a run for all replicas, in the region of its bucket.",
    )
    add_common_options(parser)
    parser.add_argument("uri", help="rendezvous URI of the run")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return exit_code_of(lambda: _run(options.uri), uri=options.uri, verbose=options.verbose)


def _run(uri: str) -> int:
    syncer = Syncer(open_store(uri))
    signal.signal(signal.SIGTERM, lambda *_: syncer.leave())
    signal.signal(signal.SIGINT, lambda *_: syncer.leave())
    syncer.run()
    return EX_TERMINATED if syncer.left else 0


if __name__ == "__main__":
    end_process(main())
