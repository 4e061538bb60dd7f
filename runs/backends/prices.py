"""Check the current price of a pool's hardware against the pool's limit, and budgets.

List prices change while a run waits or trains, so the price is checked before every launch. A pool
whose price exceeds its limit is *held*: nothing is launched, the pool and one Event give the
reason, and every tick checks again. A pool with a limit and an unknown price is held as well;
:func:`runs.submit.pool_check.check_pool` refuses it on submission.

A price that a user entered is fixed. Any other comes from the catalogue
(:mod:`executors.catalogue`), whose file can be edited while the server runs. A price change ends no
running job.
"""

from __future__ import annotations

from runs.backends.executors import catalogue
from runs.models import ReplicaPool, Run
from runs.transitions import record_event

KIND = "price"
"""Kind of the Events about held and released pools and changed prices."""


def list_price(backend: str, hardware: str, *, spot: bool) -> float | None:
    """Price of the catalogue, in USD per hour; None if unknown."""
    found = catalogue().get(backend, hardware)
    return found.price(spot=spot) if found else None


def price_now(pool: ReplicaPool) -> float | None:
    """Current price of one replica, in USD per hour; None if unknown."""
    if pool.price_given:
        return pool.price_usd_h
    return list_price(pool.backend, pool.hardware, spot=pool.spot)


def why_held(price: float | None, limit: float | None) -> str:
    """Why a pool is held at a price; '' if the price is within the limit."""
    if limit is None or (price is not None and price <= limit):
        return ""
    found = "none" if price is None else f"${price:g}"
    return f"expected a price of at most ${limit:g} an hour, found {found}"


def can_launch(pool: ReplicaPool, *, budget: str = "") -> bool:
    """Whether the pool can launch another replica at the current price. Records a change once.

    ``budget`` is why a budget refuses launches (:func:`runs.backends.budgets.refusal_of`), or ''.
    Makes no queries if nothing has changed since ``pool`` was read.
    """
    price = price_now(pool)
    _update_price(pool, price)
    reason = why_held(price, pool.max_price_usd_h)
    held_by = "price" if reason else "budget" if budget else ""
    reason = reason or budget
    if reason != pool.held:
        _hold(pool, reason, held_by)
    return not reason


def _update_price(pool: ReplicaPool, price: float | None) -> None:
    """Store the latest known price in the pool; it applies to new attempts."""
    old = pool.price_usd_h
    if price is None or price == old:
        return
    changed = ReplicaPool.objects.filter(pk=pool.pk, price_usd_h=old).update(price_usd_h=price)
    pool.price_usd_h = price
    if changed:
        before = "previously unknown" if old is None else f"previously ${old:g}"
        record_event(_run(pool), KIND, f"{pool}: ${price:g} an hour, {before}")


def _hold(pool: ReplicaPool, reason: str, held_by: str) -> None:
    """Hold or release a pool. The process that changed the row records the Event. Another amount in
    the same reason is no new Event."""
    rows = ReplicaPool.objects.filter(pk=pool.pk)
    if reason:
        if rows.exclude(held_by=held_by).update(held=reason, held_by=held_by):
            message = f"{pool}: nothing is launched: {reason}"
            record_event(_run(pool), KIND, message, level="warning")
        else:
            rows.update(held=reason)
    elif rows.exclude(held="").update(held="", held_by=""):
        what = "budget" if pool.held_by == "budget" else "price"
        record_event(_run(pool), KIND, f"{pool}: the {what} is within the limit, launches resume")
    pool.held, pool.held_by = reason, held_by


def _run(pool: ReplicaPool) -> Run:
    return Run.objects.get(pk=pool.run_id)
