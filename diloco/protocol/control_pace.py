"""How often a replica makes the requests that are not data, and how many these are.

Some follow the clock (heartbeats, commands, telemetry), the others the rounds. A replica that no
process waits for is *calm*: it writes a heartbeat per heartbeat timeout instead of five, fewer in
the middle of its computation, and reads the commands less often. While it computes it reads whether
it is awaited (:class:`diloco.membership.lease.Lease`).
``bench/control_traffic.py`` counts both under virtual time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.protocol.settings import GroupSettings

BEATS_PER_TIMEOUT = 5
"""Heartbeats within a heartbeat timeout: four in a row can fail before a live replica counts as
dead."""
SUSPECTED_SHARE = 0.5
"""Share of the heartbeat timeout without a heartbeat after which no round waits for a replica."""
LONGEST_LOOK_S = 15.0
"""Longest time between two reads of the commands, also where heartbeats are further apart."""
CHECK_EVERY = BEATS_PER_TIMEOUT
"""Looks between two checks for a newer process of the replica."""
CALM_CHECK_EVERY = 2 * CHECK_EVERY
"""The same for a calm replica."""
CALM_LOOKS = 4
"""Looks of a calm replica between two reads of the commands, if :data:`LONGEST_LOOK_S` allows."""
MOST_CALM_TIMEOUTS = 3
"""Longest time between two heartbeats of a calm replica, in heartbeat timeouts."""
LONGEST_AWAITED_LOOKS = 2
"""Longest time between two reads of whether a replica is awaited, in heartbeat intervals."""
TELEMETRY_INTERVAL_S = 20.0
"""Default time between two segments of telemetry: how far the curves of the page can lag."""

POLLS_PER_ROUND = 8
"""Reads of the plan and the commit by a replica in a round."""
LISTING_REPLICAS = 2
"""Replicas that list. The second begins later, and lists only in rounds with a straggler or of many
replicas."""
READS_PER_LISTING = 0.9
"""Records and leases of each replica that a listing replica reads, in a round without a
straggler."""
LISTINGS_PER_ROUND = 3
"""Listings of a replica that lists, in a round without a straggler."""
READ_AHEAD_PAYLOADS = 8
"""Contributors up to which payloads are read before there is a plan: each is looked for. The time
that this saves is the same in a larger group, in which a round takes longer."""
FAILED_POLLS = 8
"""Such requests that can find nothing, in a round. The others read the payload."""
USUAL_FAILED_POLLS = 4
"""The number of them in a round without a straggler."""


def calm_interval_s(heartbeat_timeout_s: float, *, left_s: float = 0.0) -> float:
    """Return the seconds until the next heartbeat of a replica that no process waits for, and that
    computes for another ``left_s``.

    A process that begins to wait reads the last heartbeat alone: if it is old, the round goes on at
    once. So one falls into the last timeout before the end of the computation, and those in the
    middle of a long one are further apart.
    """
    longest_s = heartbeat_timeout_s * MOST_CALM_TIMEOUTS
    return min(max(left_s - heartbeat_timeout_s, heartbeat_timeout_s), longest_s)


def is_short_round(round_s: float, heartbeat_timeout_s: float) -> bool:
    """Return whether a replica that computes for ``round_s`` (0: not known) writes every heartbeat.

    A calm one is suspected half a timeout after the wait for it began, another one half a timeout
    after its last heartbeat. In rounds shorter than a timeout this difference is a large part of
    the round, and there are few heartbeats to leave out."""
    return 0 < round_s < heartbeat_timeout_s


def calm_bound_s(interval_s: float, heartbeat_timeout_s: float) -> float:
    """Return how long a live replica whose lease has ``interval_s`` can leave it unchanged, in
    addition to the heartbeat timeout: 0 if it is not calm, and never more than the longest calm
    interval."""
    if not interval_s >= heartbeat_timeout_s:  # also NaN
        return 0.0
    return min(interval_s, heartbeat_timeout_s * MOST_CALM_TIMEOUTS)


def calm_looks_per_read(look_s: float) -> int:
    """Return after how many looks a calm replica reads the commands."""
    return max(1, min(CALM_LOOKS, int(LONGEST_LOOK_S / look_s)))


def awaited_looks(left_s: float, heartbeat_timeout_s: float) -> int:
    """Return after how many intervals a calm replica that computes for another ``left_s`` reads
    whether it is awaited: it is not in the first part of a long round, unless it is much slower
    than the others."""
    return LONGEST_AWAITED_LOOKS if left_s > 2 * heartbeat_timeout_s else 1


def looks_per_beat(interval_s: float) -> int:
    """Return how many times a replica can read commands within the interval of its heartbeats."""
    return math.ceil(interval_s / LONGEST_LOOK_S)


def default_interval_s(heartbeat_timeout_s: float) -> float:
    """Return the seconds between two heartbeats: each one is a request that has its price."""
    return heartbeat_timeout_s / BEATS_PER_TIMEOUT


@dataclass(frozen=True, kw_only=True)
class ControlRequests:
    """Control requests of a whole group. A listing is priced like a PUT and counts as one."""

    puts: float
    gets: float


def control_requests(
    settings: GroupSettings, *, replicas: float, rounds: float, wall_s: float
) -> ControlRequests:
    """Return the control requests of ``replicas`` in ``rounds`` that take ``wall_s`` together.

    ``replicas`` is the mean number of live ones.
    """
    interval_s = default_interval_s(settings.heartbeat_timeout_s)
    timeout_s = settings.heartbeat_timeout_s
    if is_short_round(wall_s / rounds if rounds else 0.0, timeout_s):
        beats = wall_s / interval_s
    else:  # one when it begins to compute, one when it has contributed, and those in between
        beats = 2 * rounds
        beats += max(0.0, wall_s - rounds * timeout_s) / (timeout_s * MOST_CALM_TIMEOUTS)
    look_s = interval_s / looks_per_beat(interval_s)
    reads = 1 / calm_looks_per_read(look_s) + 1 / CALM_CHECK_EVERY
    timed_puts = beats + wall_s / TELEMETRY_INTERVAL_S
    often_s = min(wall_s, rounds * 2 * timeout_s)
    awaited = (often_s + (wall_s - often_s) / awaited_looks(wall_s, timeout_s)) / interval_s
    timed_gets = wall_s / look_s * reads + awaited
    listing = min(LISTING_REPLICAS, settings.num_replicas)
    round_puts: float = listing * LISTINGS_PER_ROUND + 2  # and one plan, one commit
    round_gets = replicas * (POLLS_PER_ROUND + READS_PER_LISTING * listing)
    if 1 < replicas <= READ_AHEAD_PAYLOADS and settings.reduce_plan != "syncer":
        round_gets += replicas * USUAL_FAILED_POLLS
        round_puts += replicas  # a listing of the reduced shards
    return ControlRequests(
        puts=replicas * timed_puts + rounds * round_puts,
        gets=replicas * timed_gets + rounds * round_gets,
    )
