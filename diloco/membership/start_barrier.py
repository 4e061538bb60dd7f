"""Before round 1: who waits for whom.

Two waits in one: for all target replicas, but only for a while (``start_wait_s``), and for
``start_replicas`` of them for ever, so that a gang of paid machines does not begin with one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.clock import Clock
from diloco.membership.lease import Lease, Observer, patiently
from diloco.protocol import keys
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

log = logging.getLogger(__name__)

POLL_S = 0.25


def wait_for_everybody(
    store: Store,
    settings: GroupSettings,
    *,
    lease: Lease,
    observer: Observer,
    clock: Clock,
    check: Callable[[], None],
) -> None:
    """Return when this replica may take its first step: enough are there, or others have begun.

    What it waits for stands in the lease. Raises what ``check`` raises, to leave.
    """
    patiently(
        lease.beat, clock=clock, check=check
    )  # at once: who is still syncing is not waited for
    give_up_s = clock.monotonic() + settings.start_wait_s
    target, wanted = settings.num_replicas, settings.start_replicas
    me, ready = {lease.identity.replica}, 1
    while ready < wanted or clock.monotonic() < give_up_s:
        observer.look()
        if observer.begun() or store.list(keys.contributions(1)):
            return
        ready = len(observer.ready_to_begin() | me)
        live = len(observer.working_towards(1) | me)
        if ready >= wanted and live >= target:
            return
        message = f"{live} of {target} replicas are here"
        if ready < wanted:
            message = (
                f"{ready} of {target} replicas are here, the first step is taken with {wanted}"
            )
        lease.update(message=message)
        check()
        clock.sleep(POLL_S)
    log.warning("started without all replicas after %g s", settings.start_wait_s)
