"""How a replica leaves that was asked to: in stages, each with its share of the time.

1. It waits for open rounds whose commits are the bases of steps that it has made since.
2. It contributes what is not contributed yet (:mod:`diloco.training.resume`).
3. Where nobody else is there to close the round, it closes it.

A stage that runs out of time is broken off, and what it would have done is left to the next process
or lost: steps that were not contributed are made again. Saving the state comes after all of them.
"""

from __future__ import annotations

from diloco.errors import Leaving
from diloco.membership.graceful_shutdown import BASE_SHARE, COMMIT_SHARE, Departure
from diloco.training.round_loop import RoundLoop

LEFT = "left"


def part(loop: RoundLoop, departure: Departure) -> str:
    """Returns why training ends: *left*, unless something else ended it meanwhile."""
    for share, stage in (
        (BASE_SHARE, _settle_bases),
        (COMMIT_SHARE, _hand_in),
        (COMMIT_SHARE, _settle_alone),
    ):
        departure.share = share
        if not departure.begun or departure.is_over():
            continue
        loop.open_rounds.resume()
        try:
            if reason := stage(loop):
                return reason
        except Leaving as leaving:
            if str(leaving) != LEFT:
                return str(leaving)
    return LEFT


def _settle_bases(loop: RoundLoop) -> str:
    opened = loop.open_rounds
    while len(opened) and loop.work.now.steps > opened.first().mark.steps:
        if reason := loop.close_round():
            return reason
    return ""


def _hand_in(loop: RoundLoop) -> str:
    loop.catch_up(None)
    commit = loop.state.last_commit
    if commit is not None and commit.last:
        return loop.after(commit)
    loop.say("uploading")
    loop.handover.hand_in(loop.round, loop.open_rounds, contribute=loop.contribute)
    return ""


def _settle_alone(loop: RoundLoop) -> str:
    loop.observer.look()
    if loop.observer.live() - {loop.identity.replica}:
        return ""
    ahead = loop.handover.ahead
    if ahead and ahead[0].round == loop.round:
        loop.open_rounds.begin(ahead.pop(0))
    while len(loop.open_rounds):
        if reason := loop.close_round():
            return reason
    return ""
