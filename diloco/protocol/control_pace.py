"""How often a replica makes the requests that are not data, and how many these are.

Some follow the clock (heartbeats, commands, telemetry), the others the rounds. A replica that no
process waits for is *calm*: it writes a heartbeat per heartbeat timeout instead of five, and reads
whether it is awaited (:class:`diloco.membership.lease.Lease`).
``bench/control_traffic.py`` counts both under virtual time.
"""

from __future__ import annotations

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
"""Reads of the commands between two checks for a newer process of the replica."""
TELEMETRY_INTERVAL_S = 15.0
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


def calm_interval_s(heartbeat_timeout_s: float) -> float:
    """Return the seconds between two heartbeats of a replica that no process waits for."""
    return heartbeat_timeout_s


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
    beats = wall_s / calm_interval_s(settings.heartbeat_timeout_s) + rounds
    looks = wall_s / min(interval_s, LONGEST_LOOK_S)
    timed_puts = beats + wall_s / TELEMETRY_INTERVAL_S
    timed_gets = looks * (1 + 1 / CHECK_EVERY) + wall_s / interval_s
    listing = min(LISTING_REPLICAS, settings.num_replicas)
    round_puts = listing * LISTINGS_PER_ROUND + 2  # and one plan, one commit
    round_gets = replicas * (POLLS_PER_ROUND + READS_PER_LISTING * listing)
    return ControlRequests(
        puts=replicas * timed_puts + rounds * round_puts,
        gets=replicas * timed_gets + rounds * round_gets,
    )
