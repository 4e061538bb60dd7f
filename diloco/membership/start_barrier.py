"""The start barrier before round 1.

A replica waits for all target replicas for up to ``start_wait_s``, and without a limit for
``start_replicas`` of them, so that a gang of paid machines does not start with a single one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.clock import Clock
from diloco.membership.lease import Lease, patiently
from diloco.membership.observer import Observer
from diloco.protocol import keys
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

log = logging.getLogger(__name__)

POLL_S = 0.25


def wait_for_start(
    store: Store,
    settings: GroupSettings,
    *,
    lease: Lease,
    observer: Observer,
    clock: Clock,
    check: Callable[[], None],
) -> None:
    """Wait until enough replicas are ready or another one has started.

    The lease shows what the replica waits for. Raises the exceptions of ``check``.
    """
    # Write the new state at once: the others do not wait for a replica that is still syncing.
    patiently(lease.beat, clock=clock, check=check)
    give_up_s = clock.monotonic() + settings.start_wait_s
    target, required = settings.num_replicas, settings.start_replicas
    own, ready = {lease.identity.replica}, 1
    while ready < required or clock.monotonic() < give_up_s:
        observer.look()
        if observer.begun() or store.list(keys.round_dir(1)):
            return
        ready = len(observer.ready_to_begin() | own)
        live = len(observer.working_towards(1) | own)
        if ready >= required and live >= target:
            return
        message = f"{live} of {target} replicas are here"
        if ready < required:
            message = f"{ready} of {target} replicas are ready, training starts with {required}"
        lease.update(message=message)
        check()
        clock.sleep(POLL_S)
    log.warning("started without all replicas after %g s", settings.start_wait_s)
