"""Set the prices of hardware and of traffic. The caller checks the role."""

from __future__ import annotations

import math

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from executors.catalogue import MAX_PRICE_USD_H
from executors.registry import BACKENDS
from runs import audit
from runs.backends import price_settings
from runs.backends.executors import deployed
from runs.exceptions import ActionRefused
from runs.models import PriceOverride, TrafficPrice

SCHEMES = {
    "s3": "S3 and S3-compatible stores",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
    "hf": "Hugging Face repositories",
}
"""Scheme of a bucket's URI -> its name. A folder costs nothing."""
MOST_USD = MAX_PRICE_USD_H


def set_hardware_price(
    backend: str,
    hardware: str,
    *,
    price_usd_h: float | None,
    spot_price_usd_h: float | None,
    actor: User,
) -> bool:
    """Set the prices of a replica on some hardware; None keeps that of the catalogue, and two of
    them remove the entry. False if nothing changed. Raises :class:`ActionRefused`.

    The next launch of each pool uses them. Running jobs keep theirs.
    """
    if backend not in BACKENDS or deployed().get(backend, hardware) is None:
        raise ActionRefused(f"expected hardware of the catalogue, found {backend} {hardware}")
    for price in (price_usd_h, spot_price_usd_h):
        if price is not None:
            _check("a price an hour", price)
    rows = PriceOverride.objects.filter(backend=backend, hardware=hardware)
    with transaction.atomic():
        if price_usd_h is None and spot_price_usd_h is None:
            changed = bool(rows.delete()[0])
        else:
            before = rows.values_list("price_usd_h", "spot_price_usd_h").first()
            changed = before != (price_usd_h, spot_price_usd_h)
            PriceOverride.objects.update_or_create(
                backend=backend,
                hardware=hardware,
                defaults={
                    "price_usd_h": price_usd_h,
                    "spot_price_usd_h": spot_price_usd_h,
                    "changed_by": actor,
                    "changed_at": timezone.now(),
                },
            )
        if changed:
            audit.record(
                "price.changed",
                actor=actor,
                target=f"{backend} {hardware}",
                detail=f"on demand {_shown(price_usd_h)}, spot {_shown(spot_price_usd_h)}",
            )
    price_settings.read()
    return changed


def set_traffic_price(scheme: str, prices: price_settings.Traffic | None, *, actor: User) -> bool:
    """Set what traffic with one kind of bucket costs, or with None remove it. False if nothing
    changed. Raises :class:`ActionRefused`."""
    if scheme not in SCHEMES:
        raise ActionRefused(f"expected a scheme of {', '.join(SCHEMES)}, found {scheme!r}")
    if prices is not None:
        for name, value in vars(prices).items():
            _check(name, value)
    before = price_settings.traffic_prices().get(scheme)
    with transaction.atomic():
        if prices is None:
            changed = bool(TrafficPrice.objects.filter(scheme=scheme).delete()[0])
        else:
            changed = before != prices
            values = {**vars(prices), "changed_by": actor, "changed_at": timezone.now()}
            TrafficPrice.objects.update_or_create(scheme=scheme, defaults=values)
        if changed:
            detail = "removed" if prices is None else str(vars(prices))
            audit.record("price.changed", actor=actor, target=f"traffic {scheme}", detail=detail)
    price_settings.read()
    return changed


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= MOST_USD):
        raise ActionRefused(f"{name}: expected 0 to {MOST_USD:,.0f} USD, found {value}")


def _shown(price: float | None) -> str:
    return "as in the catalogue" if price is None else f"${price:g}"
