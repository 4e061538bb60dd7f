"""Limits of the columns of amounts: a sum that overflows fails the query on PostgreSQL."""

from __future__ import annotations

from django.core.validators import MaxValueValidator, MinValueValidator

from executors.catalogue import MAX_PRICE_USD_H

MAX_USD = 1e12
MAX_BILLED_S = 1e9

PRICE = (MinValueValidator(0.0), MaxValueValidator(MAX_PRICE_USD_H))
COST = (MinValueValidator(0.0), MaxValueValidator(MAX_USD))
BILLED = (MinValueValidator(0.0), MaxValueValidator(MAX_BILLED_S))

EXPECTED_PRICE = f"0 to {MAX_PRICE_USD_H:,.0f} USD per hour"


def is_price(usd_h: float) -> bool:
    """Whether a column of a price can hold it; False for one that is not a number."""
    return 0.0 <= usd_h <= MAX_PRICE_USD_H


def bounded_usd(usd: float) -> float:
    """The cost between 0 and :data:`MAX_USD`; 0 for one that is not a number."""
    return min(max(0.0, usd), MAX_USD)
