"""Prices that administrators set in the application: of hardware, and of traffic.

Prices are needed at every launch and on most pages, so each process keeps a copy.
:func:`refresh` reads the tables again if the copy is older than ``settings.PRICE_REFRESH_S``;
requests and tasks call it before they begin. A change through :mod:`runs.actions.prices` is
visible at once in the process that made it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from django.conf import settings
from django.db import DatabaseError

from executors.catalogue import Catalogue
from runs.models import PriceOverride, TrafficPrice

logger = logging.getLogger(__name__)

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Prices of replicas' traffic with one kind of bucket."""

    upload_usd_gb: float
    download_usd_gb: float
    requests_usd_million: float

    def cost_usd(self, *, up: int, down: int, requests: int) -> float:
        """The estimate for these bytes and requests."""
        moved = up * self.upload_usd_gb + down * self.download_usd_gb
        return moved / GB + requests * self.requests_usd_million / 1e6


@dataclass
class _Copy:
    hardware: dict[tuple[str, str], tuple[float | None, float | None]] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    read_at: float | None = None
    applied: tuple[Catalogue, Catalogue] | None = None
    """A catalogue, and the same with the prices of this copy."""


_copy = _Copy()


def refresh() -> None:
    """Read the tables again if the copy is old."""
    every_s = settings.PRICE_REFRESH_S
    now = time.monotonic()
    if every_s and (_copy.read_at is None or now - _copy.read_at > every_s):
        try:
            read()
        except DatabaseError as error:
            logger.warning("the prices could not be read, the previous ones apply: %s", error)


def read() -> None:
    """Read the tables."""
    global _copy
    hardware = {
        (row.backend, row.hardware): (row.price_usd_h, row.spot_price_usd_h)
        for row in PriceOverride.objects.all()
    }
    traffic = {
        row.scheme: Traffic(
            upload_usd_gb=row.upload_usd_gb,
            download_usd_gb=row.download_usd_gb,
            requests_usd_million=row.requests_usd_million,
        )
        for row in TrafficPrice.objects.all()
    }
    _copy = _Copy(hardware=hardware, traffic=traffic, read_at=time.monotonic())


def applied(catalogue: Catalogue) -> Catalogue:
    """The catalogue with the prices that administrators set."""
    copy = _copy
    if not copy.hardware:
        return catalogue
    if copy.applied is None or copy.applied[0] is not catalogue:
        copy.applied = catalogue, catalogue.with_prices(copy.hardware)
    return copy.applied[1]


def traffic_prices() -> Mapping[str, Traffic]:
    """Scheme of a bucket's URI -> its prices; a scheme without prices is missing."""
    return _copy.traffic
