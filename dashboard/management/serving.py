"""Shared code of the commands ``serve`` and ``demo``."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any

from dashboard.server.supervisor import Supervisor, SupervisorError


def address_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default=os.environ.get("ARCHIPELAGO_HOST", "127.0.0.1"),
        help="address to listen on (ARCHIPELAGO_HOST)",
    )
    parser.add_argument(
        "--port",
        default=os.environ.get("ARCHIPELAGO_PORT", "8000"),
        help="port to listen on (ARCHIPELAGO_PORT)",
    )


def supervisor(options: Mapping[str, Any], *, report: Callable[[str], None]) -> Supervisor:
    """Create the supervisor from command-line options."""
    text = str(options["port"])
    if not text.isdigit() or not 0 < int(text) < 65_536:
        raise SupervisorError(f"port: expected a number from 1 to 65535, found {text!r}")
    return Supervisor(host=options["host"], port=int(text), report=report)
