"""An event loop for tests of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

TIMEOUT_S = 240
"""Time after which a silent stream fails its test."""


def watch(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
