"""Processor time, which other work on a machine changes far less than the clock."""

from __future__ import annotations

import os
import time
from pathlib import Path


def spent_s() -> float:
    """Of this process, and of the server process of its database connection where that is
    PostgreSQL on this machine (in hundredths of a second, as Linux reports it)."""
    from django.db import connection

    own = time.process_time()
    if connection.vendor != "postgresql" or connection.connection is None:
        return own
    stat = Path(f"/proc/{connection.connection.info.backend_pid}/stat").read_text()
    user, system = stat.rsplit(")", 1)[1].split()[11:13]
    return own + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
