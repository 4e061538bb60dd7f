"""From one process of a replica to the next: what it leaves behind, and how that is taken up.

A process that is asked to leave contributes what it has, to the round whose steps are being made
and to the other fragments' next rounds. Most of these are decided after it has gone. The next
process goes on at the data step where this one stood; in rounds that have been contributed to it
adds nothing, and what it does meanwhile stays in its local weights for its next contribution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from diloco.exchange.inflight_rounds import OpenRound, OpenRounds
from diloco.exchange.round_observer import Sight
from diloco.model.inner_state import Inner
from diloco.protocol.reading import Damaged
from diloco.store.base import Store
from diloco.training.local_progress import Ledger
from diloco.training.post_round import Chores
from diloco.training.replica_state import HandedIn, load_replica_state

log = logging.getLogger(__name__)


class Handover:
    """Both ends of it. ``ahead`` has the rounds that were contributed to without waiting."""

    def __init__(
        self, store: Store, ledger: Ledger, inner: Inner, chores: Chores, sight: Sight
    ) -> None:
        self.ahead: list[OpenRound] = []
        self._store = store
        self._ledger = ledger
        self._inner = inner
        self._chores = chores
        self._sight = sight
        self._data_step = 0

    # -- taking up -------------------------------------------------------------------------------

    def take_up(self) -> None:
        """Take up what an earlier process of this replica saved of its own, now that the global
        state has caught up with the log."""
        ledger = self._ledger
        saved = load_replica_state(self._store, ledger.identity.replica)
        if saved is None:
            return
        try:
            since = [self._sight.commit_of(r) for r in range(saved.round + 1, ledger.state.round)]
        except Damaged as error:
            log.error("what was saved after round %d is not used: %s", saved.round, error)
            return
        ledger.restore(saved, [commit for commit in since if commit])
        self._data_step = saved.data_step
        self._chores.tokens_before = saved.tokens
        try:
            self._inner.load(saved.trees)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            log.error("what was saved after round %d does not fit: %s", saved.round, error)
            return
        ledger.rounds_here = ledger.settings.quarantine_rounds  # its inner optimizer is not cold
        log.info("inner optimizer and residual are those saved after round %d", saved.round)

    @property
    def steps_made(self) -> int:
        """Steps of the next round of the log that the earlier process made and handed in."""
        ledger = self._ledger
        if ledger.earlier_contribution(ledger.state.round) is None:
            return 0
        return max(0, self._data_step - (ledger.state.round - 1) * ledger.settings.round_steps)

    # -- leaving behind --------------------------------------------------------------------------

    def hand_in(
        self, round: int, opened: OpenRounds, *, contribute: Callable[[OpenRound], None]
    ) -> None:
        """Contribute to ``round``, whose steps are being made, and to those after it that are the
        other fragments' next ones: their bases are known, and whoever is there closes them."""
        ledger = self._ledger
        for ahead in range(round, round + ledger.settings.num_fragments):
            fragment = self._sight.fragment(ahead)
            idle = ledger.work.steps_since_base(fragment) == 0
            made = opened.has_fragment(fragment) or ledger.earlier_contribution(ahead) is not None
            if idle or made:
                continue
            work = ledger.open(ahead, fragment)
            if work is None:
                log.error("expected finite weights, found NaN or infinity; nothing is handed in")
                return
            contribute(work)
            self.ahead.append(work)

    def save(self, contributed: Iterable[OpenRound], *, round: int, data_step: int) -> None:
        """Save what is this replica's own. ``contributed`` are open rounds whose contribution is
        durable, beside those ``ahead``; ``round`` and ``data_step`` are where it stands."""
        ledger = self._ledger
        if ledger.work.now.steps == 0:
            return  # what is saved already is all there is
        handed_in = {
            round: handed
            for round, handed in ledger.handed_in.items()
            if ledger.earlier_contribution(round) is not None
        }
        for opened in (*contributed, *self.ahead):
            handed_in[opened.round] = HandedIn(
                incarnation=ledger.identity.incarnation,
                residual=ledger.residuals.left_out(opened.contributed),
            )
        # Steps that are not handed in are made again, with their data.
        lost = 0 if round in handed_in else ledger.work.tokens_in_round
        self._chores.save_leaving(
            ledger.residuals, handed_in, data_step=data_step, lost_tokens=lost
        )
