"""Chooses the number of parts in flight from measured rates.

A line gives more bytes per second for more parts in flight, until it is full: a connection has a
largest rate and every request a latency. The best number is unknown and changes. It is found by
trying: the limit doubles while that pays, and later one step up or down is tried now and then. A
step is kept if the rate changes by more (up) or less (down) than :data:`PAYS` of the change of the
limit, so that the limit stays where the line is just full. An error halves it.

An object whose number of parts is known goes in turns of as many parts as are in flight. While all
objects that are measured have the same number of parts, a step is to the next limit with other
turns; the same turns would be no faster. Otherwise a step up becomes larger with each vain one.

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
MIXED = -1
"""Instead of a number of parts: objects had several."""
SMALL, SMALL_IN_A_ROW = 0.5, 8
"""Objects with less than this share of the parts of those that were measured are not measured, up
to so many in a row: rates of objects of different sizes do not compare."""


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
    rates of the current stage. ``parts`` is the number of parts of every object that was measured
    since the limit is held, while it doubles that of the last one: 0 if it is unknown, and
    :data:`MIXED` if it is not the same. ``small`` counts the objects since then that were too
    small. The limit stays between 1 and ``most``.
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
    parts: int = 0
    small: int = 0

    @property
    def needs_rate(self) -> bool:
        """Whether the next transfer must be measured: a step is compared with rates that were
        measured just before it."""
        return self.stage is not Stage.HOLD or self.seen >= self.hold - SAMPLES

    def in_flight(self, parts: int) -> int:
        """Return how many of an object's ``parts`` to have in flight: equal turns, except if it
        must be measured and others had another number of parts."""
        if self.needs_rate and parts != self.parts and not self.is_small(parts):
            return self.limit
        return in_equal_turns(self.limit, parts, most=self.most)

    def is_small(self, parts: int) -> bool:
        """Return whether an object of ``parts`` is not measured, because others had many more."""
        return 0 < parts < SMALL * self.parts and self.small < SMALL_IN_A_ROW


def in_equal_turns(limit: int, parts: int, *, most: int) -> int:
    """Return how many of an object's ``parts`` to have in flight: ``limit``, or more, at most
    ``most``, if that makes its turns equal.

    Parts that begin together end at about the same time, and a last turn of few parts does not fill
    the line. With a limit of 16, 50 parts take four turns, the last one of two parts. With 17 in
    flight they take three.
    """
    turns = max(1, parts // limit)
    in_flight = -(-parts // turns)
    is_little = in_flight * turns <= limit * (turns + 1)
    return in_flight if limit < in_flight <= most and is_little else limit


def first_state(most: int) -> LimitState:
    """Return the state before the first observation. Raises :class:`ValueError` for a limit below
    1."""
    if most < 1:
        raise ValueError(f"expected at least 1 part in flight, found {most}")
    return LimitState(most=most, limit=min(FIRST, most), chosen=min(FIRST, most))


def observed(
    state: LimitState, rate: float, *, parts: int = 0, in_flight: int | None = None
) -> LimitState:
    """Return the state after the line gave ``rate`` bytes per second with ``in_flight`` parts in
    flight, ``state.limit`` if not given, of an object of ``parts``, 0 if unknown."""
    if state.is_small(parts):
        return replace(state, small=state.small + 1)
    state = replace(state, small=0)
    if state.stage is Stage.DOUBLE:
        return _doubled(state, rate, parts)
    if state.stage is Stage.HOLD:
        state = _averaged(state, rate, parts, in_flight in (None, state.limit))
        return _stepped(state) if state.seen >= state.hold else state
    state = replace(state, seen=state.seen + 1, total=state.total + rate)
    return _judged(state) if state.seen >= SAMPLES else state


def _averaged(state: LimitState, rate: float, parts: int, is_exact: bool) -> LimitState:
    """Return the state with ``rate`` in the average at the held limit.

    Rates of objects with other numbers of parts are forgotten. This one is no measurement if it had
    more than the limit in flight, for equal turns, and earlier objects other turns.
    """
    same, is_first = parts == state.parts, state.seen == 0
    if same and state.rate:
        rate = state.rate + SMOOTHING * (rate - state.rate)
    elif not (same or is_first or is_exact):
        rate = 0.0
    parts = parts if same or is_first else MIXED
    return replace(state, seen=state.seen + 1, rate=rate, parts=parts)


def failed(state: LimitState) -> LimitState:
    """Return the state after the store refused or dropped a request: half the limit, from which it
    rises again step by step."""
    half = max(1, state.limit // 2)
    return LimitState(most=state.most, limit=half, chosen=half, stage=Stage.HOLD)


def _doubled(state: LimitState, rate: float, parts: int) -> LimitState:
    state = replace(state, parts=parts)
    if state.rate and not _pays(state, rate):
        return _held(state, hold=HOLD)
    state = replace(state, chosen=state.limit, rate=rate)
    if state.limit == state.most:
        return replace(_held(state, hold=HOLD), upward=False)
    return replace(state, limit=min(2 * state.limit, state.most))


def _stepped(state: LimitState) -> LimitState:
    """Try the next limit in the direction whose turn it is; without one the step is vain."""
    limit = _neighbour(state, upward=state.upward)
    if limit == state.chosen:
        return _turned(state)
    return replace(state, stage=Stage.STEP, limit=limit, seen=0, total=0.0)


def _neighbour(state: LimitState, *, upward: bool) -> int:
    """Return the next limit a step or more away that changes the parts in flight of an object like
    those that were measured; the chosen one if there is none."""
    size = max(1, state.chosen // STEP)
    if upward:
        if state.parts == MIXED:
            size *= max(1, state.hold // HOLD)
        limits = range(min(state.chosen + size, state.most), state.most + 1)
    else:
        limits = range(max(state.chosen - size, 1), 0, -1)

    now = _in_flight(state, state.chosen)
    return next((limit for limit in limits if _in_flight(state, limit) != now), state.chosen)


def _in_flight(state: LimitState, limit: int) -> int:
    """Return the parts in flight with ``limit``, of an object like those that were measured."""
    if state.parts <= 0:
        return limit
    return min(state.parts, in_equal_turns(limit, state.parts, most=state.most))


def _judged(state: LimitState) -> LimitState:
    rate = state.total / state.seen
    if _pays(state, rate):
        return _stepped(replace(state, chosen=state.limit, rate=rate, hold=HOLD))
    return _turned(state)


def _turned(state: LimitState) -> LimitState:
    """Hold the chosen limit for twice as long as before, and then try the other direction."""
    turned = replace(state, upward=not state.upward)
    return _held(turned, hold=min(2 * state.hold, LONGEST_HOLD))


def _held(state: LimitState, *, hold: int) -> LimitState:
    return replace(state, stage=Stage.HOLD, limit=state.chosen, seen=0, total=0.0, hold=hold)


def _pays(state: LimitState, rate: float) -> bool:
    """Return whether ``limit`` is better than the chosen one: a higher one must gain, and a lower
    one must lose less than, :data:`PAYS` of its change."""
    change = _in_flight(state, state.limit) / _in_flight(state, state.chosen) - 1
    return rate > state.rate * (1 + PAYS * change)
