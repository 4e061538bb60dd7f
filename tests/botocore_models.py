"""One loader of service models for all botocore sessions of this process.

Every session has its own loader, and parsing the models takes most of the time of a new client.
"""

from __future__ import annotations

import functools

import botocore.session


@functools.cache
def share() -> None:
    """Let every session with the same search path use the same loader."""
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
