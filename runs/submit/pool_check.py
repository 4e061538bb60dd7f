"""Checks a requested pool: backend, hardware, price, options and credential."""

from __future__ import annotations

from collections.abc import Callable

from executors.base import ExecutorError
from executors.catalogue import Hardware
from executors.registry import DESCRIPTIONS
from runs.backends.executors import BACKENDS, catalogue
from runs.backends.prices import list_price
from runs.credentials.restrictions import refused_image, refused_options
from runs.exceptions import InvalidRun
from runs.models import Credential, money
from runs.submit.run_draft import PoolDraft

POOL_LIMIT = 1024


def check_pool(pool: PoolDraft, index: int = 0) -> Hardware:
    """Validate a pool and return its hardware. Raises :class:`InvalidRun` for
    ``pools.<index>.<field>``."""

    def refuse(field: str, message: str) -> InvalidRun:
        return InvalidRun(f"pools.{index}.{field}", message)

    if pool.backend not in BACKENDS:
        raise refuse(
            "backend", f"expected a backend of {', '.join(BACKENDS)}, found {pool.backend!r}"
        )
    if not 1 <= pool.count <= POOL_LIMIT:
        raise refuse("count", f"expected 1 to {POOL_LIMIT} replicas in a pool, found {pool.count}")
    hardware = catalogue().get(pool.backend, pool.hardware)
    if hardware is None:
        known = ", ".join(h.name for h in catalogue().of(pool.backend))
        raise refuse(
            "hardware",
            f"expected one of {BACKENDS[pool.backend]}'s {known}, found {pool.hardware!r}",
        )
    if pool.price_usd_h is not None and not money.is_price(pool.price_usd_h):
        raise refuse("price_usd_h", f"expected {money.EXPECTED_PRICE}, found {pool.price_usd_h}")
    _check_price_limit(pool, refuse)
    credential = None
    if pool.credential is not None:
        credential = credential_of(pool.credential, pool.backend, f"pools.{index}.credential")
    if problem := refused_options(pool.backend, credential, pool.options):
        raise refuse("options", problem)
    try:
        DESCRIPTIONS[pool.backend].check_options(pool.options)
    except (ValueError, ExecutorError) as error:
        raise refuse("options", str(error)) from error
    if problem := refused_image(pool.backend, credential, pool.image):
        raise refuse("image", problem)
    return hardware


def _check_price_limit(pool: PoolDraft, refuse: Callable[[str, str], InvalidRun]) -> None:
    limit, price = pool.max_price_usd_h, pool_price(pool)
    if limit is None:
        return
    if not money.is_price(limit):
        raise refuse("max_price_usd_h", f"expected {money.EXPECTED_PRICE}, found {limit}")
    if price is None or price > limit:
        actual = "none in the catalogue" if price is None else f"${price:g}"
        raise refuse(
            "max_price_usd_h",
            f"expected {pool.hardware} for at most ${limit:g} an hour, found {actual}",
        )


def pool_price(pool: PoolDraft) -> float | None:
    """USD per hour of one replica of the pool; None if unknown."""
    if pool.price_usd_h is not None:
        return pool.price_usd_h
    return list_price(pool.backend, pool.hardware, spot=pool.spot)


def credential_of(pk: int, kind: str, field: str) -> Credential:
    credential = Credential.objects.filter(pk=pk, kind=kind).first()
    if credential is None:
        raise InvalidRun(field, f"expected a credential for {kind}, found none of number {pk}")
    return credential
