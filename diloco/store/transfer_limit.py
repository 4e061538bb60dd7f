"""Chooses the number of parts in flight from measured rates.

A line gives more bytes per second for more parts in flight, until it is full: a connection has a
largest rate and every request a latency. The best number is unknown and changes. It is found by
trying: the limit doubles while that pays, and later one step up or down is tried now and then. A
step is kept if the rate changes by more (up) or less (down) than :data:`PAYS` of the change of the
limit, so that the limit stays where the line is just full. An error halves it.

Everything here is a pure function of the state and one observation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

FIRST = 4
"""Parts in flight before anything is known about the line."""
PAYS = 0.1
"""Relative change of the rate, per relative change of the limit, from which a higher limit pays."""
STEP = 4
"""A step is the limit over this number, at least 1."""
SAMPLES = 2
"""Observations of a step before it is judged."""
HOLD, LONGEST_HOLD = 4, 64
"""Observations between two steps; twice as many after each step that did not pay."""
SMOOTHING = 0.3
"""Weight of the newest rate in the average at the chosen limit."""


class Stage(enum.Enum):
    """Uses of the next observation."""

    DOUBLE = enum.auto()
    """The limit doubles as long as that pays."""
    HOLD = enum.auto()
    """The limit stays, and its rate is averaged."""
    STEP = enum.auto()
    """A neighbouring limit is tried."""


@dataclass(frozen=True, kw_only=True)
class LimitState:
    """The limit in use and what is known about the line.

    ``chosen`` is the best limit so far and ``rate`` its rate in bytes per second, 0 if unknown.
    ``limit`` differs from it while another limit is tried. ``seen`` and ``total`` count and sum the
    rates of the current stage. The limit stays between 1 and ``most``.
    """

    most: int
    limit: int
    chosen: int
    rate: float = 0.0
    stage: Stage = Stage.DOUBLE
    seen: int = 0
    total: float = 0.0
    hold: int = HOLD
    upward: bool = True

    @property
    def needs_rate(self) -> bool:
        """Whether the next transfer must have exactly ``limit`` parts in flight to be measured. A
        step is compared with rates that were measured just before it."""
        return self.stage is not Stage.HOLD or self.seen >= self.hold - SAMPLES


def in_equal_turns(limit: int, parts: int, *, most: int) -> int:
    """Return how many of an object's ``parts`` to have in flight: ``limit``, or more, at most
    ``most``, if that makes its turns equal.

    Parts that begin together end at about the same time, and a last turn of few parts does not fill
    the line. With a limit of 16, 50 parts take four turns, the last one of two parts. With 17 in
    flight they take three.
    """
    turns = max(1, parts // limit)
    in_flight = -(-parts // turns)
    return in_flight if limit < in_flight <= most else limit


def first_state(most: int) -> LimitState:
    """Return the state before the first observation. Raises :class:`ValueError` for a limit below
    1."""
    if most < 1:
        raise ValueError(f"expected at least 1 part in flight, found {most}")
    return LimitState(most=most, limit=min(FIRST, most), chosen=min(FIRST, most))


def observed(state: LimitState, rate: float) -> LimitState:
    """Return the state after the line gave ``rate`` bytes per second with ``state.limit`` parts in
    flight."""
    if state.stage is Stage.DOUBLE:
        return _doubled(state, rate)
    state = replace(state, seen=state.seen + 1, total=state.total + rate)
    if state.stage is Stage.HOLD:
        average = rate if not state.rate else state.rate + SMOOTHING * (rate - state.rate)
        state = replace(state, rate=average)
        return _stepped(state) if state.seen >= state.hold else state
    return _judged(state) if state.seen >= SAMPLES else state


def unmeasured(state: LimitState) -> LimitState:
    """Return the state after a transfer that was no measurement, while the limit is held. The rate
    from before it is forgotten, because the line can have changed."""
    return replace(state, seen=state.seen + 1, rate=0.0)


def failed(state: LimitState) -> LimitState:
    """Return the state after the store refused or dropped a request: half the limit, from which it
    rises again step by step."""
    half = max(1, state.limit // 2)
    return LimitState(most=state.most, limit=half, chosen=half, stage=Stage.HOLD)


def _doubled(state: LimitState, rate: float) -> LimitState:
    if state.rate and not _pays(state, rate):
        return _held(state, hold=HOLD)
    state = replace(state, chosen=state.limit, rate=rate)
    if state.limit == state.most:
        return replace(_held(state, hold=HOLD), upward=False)
    return replace(state, limit=min(2 * state.limit, state.most))


def _stepped(state: LimitState) -> LimitState:
    """Try the next limit in the direction whose turn it is, or in the other one at a bound."""
    size = max(1, state.chosen // STEP)
    upward = (state.upward or state.chosen == 1) and state.chosen < state.most
    limit = min(state.chosen + size, state.most) if upward else max(1, state.chosen - size)
    if limit == state.chosen:
        return _held(state, hold=state.hold)
    return replace(state, stage=Stage.STEP, limit=limit, upward=upward, seen=0, total=0.0)


def _judged(state: LimitState) -> LimitState:
    rate = state.total / state.seen
    if _pays(state, rate):
        return _stepped(replace(state, chosen=state.limit, rate=rate, hold=HOLD))
    turned = replace(state, upward=not state.upward)
    return _held(turned, hold=min(2 * state.hold, LONGEST_HOLD))


def _held(state: LimitState, *, hold: int) -> LimitState:
    return replace(state, stage=Stage.HOLD, limit=state.chosen, seen=0, total=0.0, hold=hold)


def _pays(state: LimitState, rate: float) -> bool:
    """Return whether ``limit`` is better than the chosen one: a higher one must gain, and a lower
    one must lose less than, :data:`PAYS` of its change."""
    change = state.limit / state.chosen - 1
    return rate > state.rate * (1 + PAYS * change)
