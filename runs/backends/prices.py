"""What an hour of a pool's replica costs now, and whether that is more than it may.

The price at submit is a promise of nobody's: lists change while a run waits or works. So it is
looked at before every launch. What costs more than the pool's limit is *held*: nothing is launched,
the pool says why, one Event tells of it, and every tick looks again. A price that nobody knows is
held under a limit too, as :func:`runs.submit.create.check_pool` refuses it at submit.

A price that somebody typed stays; any other is the catalogue's (:mod:`executors.catalogue`), whose
file may be edited while the server runs. Jobs that run are not ended when a list changes.
"""

from __future__ import annotations

from runs.backends.executors import catalogue
from runs.models import ReplicaPool, Run
from runs.transitions import record_event

KIND = "price"
"""Of the events: held, taken up again, changed."""


def price_now(pool: ReplicaPool) -> float | None:
    """USD per hour of one replica; None where nobody knows."""
    if pool.price_given:
        return pool.price_usd_h
    hardware = catalogue().get(pool.backend, pool.hardware)
    return hardware.price(spot=pool.spot) if hardware else None


def why_held(price: float | None, limit: float | None) -> str:
    """'' for a price that is all right."""
    if limit is None or (price is not None and price <= limit):
        return ""
    found = "which nobody knows now" if price is None else f"now ${price:g}"
    return f"expected a price of at most ${limit:g} an hour, {found}"


def may_launch(pool: ReplicaPool) -> bool:
    """Whether one more may be launched at the price of now; a change is written down, once.

    Free of queries while nothing has changed since ``pool`` was read.
    """
    price = price_now(pool)
    _keep(pool, price)
    words = why_held(price, pool.max_price_usd_h)
    if words != pool.held:
        _hold(pool, words)
    return not words


def _keep(pool: ReplicaPool, price: float | None) -> None:
    """The newest price that is known is the pool's, and that of the attempts to come."""
    old = pool.price_usd_h
    if price is None or price == old:
        return
    moved = ReplicaPool.objects.filter(pk=pool.pk, price_usd_h=old).update(price_usd_h=price)
    pool.price_usd_h = price
    if moved:
        before = "which nobody knew" if old is None else f"which was ${old:g}"
        record_event(_run(pool), KIND, f"{pool}: ${price:g} an hour, {before}")


def _hold(pool: ReplicaPool, words: str) -> None:
    """Held, held for another price, or taken up again. Who moved the row tells of it."""
    rows = ReplicaPool.objects.filter(pk=pool.pk)
    if words:
        if rows.filter(held="").update(held=words):
            message = f"{pool}: nothing is launched: {words}"
            record_event(_run(pool), KIND, message, level="warning")
        else:
            rows.update(held=words)
    elif rows.exclude(held="").update(held=""):
        record_event(_run(pool), KIND, f"{pool}: its price is within the limit, launches go on")
    pool.held = words


def _run(pool: ReplicaPool) -> Run:
    return Run.objects.get(pk=pool.run_id)
