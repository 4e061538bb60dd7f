"""The backend ``local``: processes of the server's own machine."""

from __future__ import annotations

from executors.backend import Backend
from executors.local.hardware import TABLE
from executors.local.options import Options

BACKEND = Backend(
    name="local",
    label="Local processes on this machine",
    executor="executors.local.executor:LocalProcessExecutor",
    hardware=TABLE,
    options=Options,
    on_server=True,
)
