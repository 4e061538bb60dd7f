"""Resuming a replica in a new process: early contributions and saved state.

A process that leaves contributes the steps it has, to the current round and to the next rounds of
the other fragments. Most of these rounds are decided after it has exited. The next process
continues at the data step of the earlier one. It adds nothing to rounds with an early contribution;
its steps during these rounds stay in its local weights for its next contribution. If it leaves
before it has made one, the process after it repeats these steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from diloco.errors import ReplicaError
from diloco.exchange.inflight_rounds import InflightRound, InflightRounds
from diloco.exchange.round_observer import RoundObserver
from diloco.exchange.step_accounting import StepMark
from diloco.model.inner_state import Inner
from diloco.protocol.reading import Damaged
from diloco.store.base import Store
from diloco.training.local_progress import LocalProgress
from diloco.training.post_round import PostRoundTasks
from diloco.training.replica_state import EarlyContribution, StateReader, load_replica_state

log = logging.getLogger(__name__)


class Resumption:
    """Restores the state of an earlier process, and saves that of this one.

    ``ahead`` has the early contributions of this process.
    """

    def __init__(
        self,
        store: Store,
        progress: LocalProgress,
        inner: Inner,
        tasks: PostRoundTasks,
        round_observer: RoundObserver,
        reader: StateReader | None = None,
    ) -> None:
        self.ahead: list[InflightRound] = []
        self._store = store
        self._progress = progress
        self._inner = inner
        self._tasks = tasks
        self._round_observer = round_observer
        self._reader = reader
        self._data_step = 0

    # -- starting --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the state that an earlier process of this replica saved. The global state must
        have caught up with the log."""
        progress = self._progress
        saved = load_replica_state(self._store, progress.identity.replica, self._reader)
        if saved is None:
            return
        try:
            since = [
                self._round_observer.commit_of(r)
                for r in range(saved.round + 1, progress.state.round)
            ]
        except Damaged as error:
            log.error("the state saved after round %d is not used: %s", saved.round, error)
            return
        progress.restore(saved, [commit for commit in since if commit])
        self._data_step = saved.data_step
        self._tasks.tokens_before = saved.tokens
        try:
            self._inner.load(saved.trees)
        except ReplicaError:
            raise
        except Exception as error:  # of any object that the caller wants restored
            log.error(
                "the state saved after round %d does not fit: %s: %s",
                saved.round,
                type(error).__name__,
                error,
            )
            return
        progress.rounds_here = progress.settings.quarantine_rounds  # the inner optimizer is warm
        log.info("inner optimizer and residuals are restored from round %d", saved.round)

    @property
    def steps_made(self) -> int:
        """Steps of the next round that the earlier process has made and contributed."""
        progress = self._progress
        if progress.earlier_contributor(progress.state.round) is None:
            return 0
        return max(0, self._data_step - (progress.state.round - 1) * progress.settings.round_steps)

    # -- leaving ---------------------------------------------------------------------------------

    def contribute_early(
        self, round: int, inflight: InflightRounds, *, contribute: Callable[[InflightRound], None]
    ) -> None:
        """Contribute to the current ``round`` and to the next round of each other fragment. Their
        bases are known, and the remaining replicas close them."""
        progress = self._progress
        for ahead in range(round, round + progress.settings.num_fragments):
            fragment = self._round_observer.fragment(ahead)
            idle = progress.counter.steps_since_base(fragment) == 0
            contributed = (
                inflight.has_fragment(fragment)
                or progress.earlier_contributor(ahead) is not None
                or any(opened.round == ahead for opened in self.ahead)  # its stage is resumed
            )
            if idle or contributed:
                continue
            self._tasks.watcher.before(ahead)
            opened = progress.open(ahead, fragment)
            if opened is None:
                log.error("expected finite weights, found NaN or infinity; nothing is contributed")
                return
            contribute(opened)
            self.ahead.append(opened)

    def save(
        self,
        contributed: Iterable[InflightRound],
        *,
        round: int,
        data_step: int,
        began: StepMark,
    ) -> None:
        """Save the replica state at ``round`` and ``data_step``. ``contributed`` are open rounds
        with a durable contribution, in addition to those in ``ahead``. ``began`` are the counts at
        the start of the oldest open round."""
        progress = self._progress
        if progress.counter.now.steps == 0:
            return  # the saved state is still the newest
        early = progress.open_early()
        own = [*contributed, *self.ahead]
        open_round = progress.state.round
        is_repeated = open_round in early and not own
        if is_repeated:  # no contribution contains the steps since that of the earlier process
            start = (open_round - 1) * progress.settings.round_steps
            data_step = min(data_step, max(start, self._data_step))
        for opened in own:
            early[opened.round] = EarlyContribution(
                incarnation=progress.identity.incarnation,
                residual=progress.left_out(opened),
            )
        # Steps that are not contributed are repeated with their data.
        lost = progress.counter.tokens_in_round
        if is_repeated:
            lost = progress.counter.now.tokens - began.tokens
        elif round in early:
            lost = 0
        self._tasks.save_leaving(early, data_step=data_step, lost_tokens=lost)
