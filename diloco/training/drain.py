"""The drain of a replica that leaves: stages with fixed shares of the available time.

1. Wait for open rounds whose commits are the bases of later steps.
2. Contribute the steps that are not contributed yet (:mod:`diloco.training.resume`).
3. If no other replica is alive, close the rounds.

A stage that exceeds its time is interrupted; the next process does the rest, or repeats the steps.
After the stages, the replica saves its state.
"""

from __future__ import annotations

from diloco.errors import StopReason, StopTraining
from diloco.membership.graceful_shutdown import BASE_SHARE, COMMIT_SHARE, GracefulShutdown
from diloco.training.round_loop import RoundLoop


def drain(loop: RoundLoop, shutdown: GracefulShutdown) -> StopReason:
    """Run all stages. Returns LEFT, unless training ended for another reason meanwhile."""
    for share, stage in (
        (BASE_SHARE, _settle_bases),
        (COMMIT_SHARE, _contribute_early),
        (COMMIT_SHARE, _settle_alone),
    ):
        shutdown.share = share
        # An exchange that looked at the clock just before the share was raised interrupts the
        # stage although there is time: it is resumed.
        while shutdown.begun and not shutdown.is_over():
            loop.inflight.resume()
            try:
                if reason := stage(loop):
                    return reason
                break
            except StopTraining as stop:
                if stop.reason != StopReason.LEFT:
                    return stop.reason
    return StopReason.LEFT


def _settle_bases(loop: RoundLoop) -> StopReason | None:
    while len(loop.inflight) and loop.counter.now.steps > loop.inflight.first().mark.steps:
        if reason := loop.close_round():
            return reason
    return None


def _contribute_early(loop: RoundLoop) -> StopReason | None:
    loop.catch_up(None)
    commit = loop.state.last_commit
    if commit is not None and commit.last:
        return loop.after(commit)
    loop.set_state("uploading")
    loop.resumption.contribute_early(loop.round, loop.inflight, contribute=loop.contribute)
    loop.await_contributions()
    return None


def _settle_alone(loop: RoundLoop) -> StopReason | None:
    loop.observer.look()
    if loop.observer.live() - {loop.identity.replica}:
        return None
    ahead = loop.resumption.ahead
    if ahead and ahead[0].round == loop.round:
        loop.inflight.begin(ahead.pop(0))
    while len(loop.inflight):
        if reason := loop.close_round():
            return reason
    return None
