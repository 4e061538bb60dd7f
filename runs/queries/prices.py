"""Prices of hardware and of traffic, with their sources."""

from __future__ import annotations

from typing import Any

from archipelago import frame_rows
from executors.registry import BACKENDS
from runs.backends.executors import catalogue, deployed, listed
from runs.json_values import row_of
from runs.models import PriceOverride, TrafficPrice


def price_rows() -> list[dict[str, Any]]:
    """Rows of all hardware (:class:`archipelago.frame_rows.Price`). ``source`` is ``list``,
    ``file`` (that of the deployment) or ``settings``."""
    ours = {(row.backend, row.hardware): row for row in PriceOverride.objects.all()}
    now, from_file, lists = catalogue(), deployed(), listed()
    rows = []
    for backend, table in now.tables.items():
        for hardware in now.of(backend):
            key = backend, hardware.name
            default, base = lists.get(*key), from_file.get(*key)
            override = ours.get(key)
            is_listed = default is not None and base == default
            source = "settings" if override else "list" if is_listed else "file"
            rows.append(
                {
                    "backend": backend,
                    "backend_label": BACKENDS.get(backend, backend),
                    "hardware": hardware.name,
                    "label": hardware.label,
                    "price_usd_h": hardware.price_usd_h,
                    "spot_price_usd_h": hardware.spot_price_usd_h,
                    "source": source,
                    "read_on": table.read_on if source == "list" else "",
                    "set_price_usd_h": override.price_usd_h if override else None,
                    "set_spot_price_usd_h": override.spot_price_usd_h if override else None,
                    "default_usd_h": base.price_usd_h if base else None,
                    "default_spot_usd_h": base.spot_price_usd_h if base else None,
                }
            )
    return rows


def traffic_rows() -> list[dict[str, Any]]:
    """Rows of the traffic prices (:class:`archipelago.frame_rows.TrafficPrice`)."""
    return [row_of(frame_rows.TrafficPrice, row) for row in TrafficPrice.objects.all()]
