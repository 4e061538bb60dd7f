"""Options of Hugging Face Jobs."""

from __future__ import annotations

from dataclasses import dataclass

from executors.options import Scope, option, poll_interval, request_timeout

DEFAULT_IMAGE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"

MAX_TIMEOUT_S = 3 * 24 * 3600.0
"""Default of ``max_timeout_s``. The Hub documents no limit; its users report that 3 days work."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """No option is open to every pool: ``volumes`` mounts whatever the token can read."""

    namespace: str = option(
        label="Namespace",
        scope=Scope.EXECUTOR,
        in_credential=True,
        help="The user or organisation that owns the jobs and pays. "
        "Leave empty for the token's user.",
    )
    image: str = option(
        DEFAULT_IMAGE,
        label="Image",
        scope=Scope.EXECUTOR,
        help="Container image with Python 3.11 or newer. A pool's own image replaces it.",
    )
    volumes: tuple[str, ...] = option(
        (),
        label="Volumes",
        help="Mounted in every job: hf://buckets/OWNER/NAME:/path[:ro], as in "
        "hf jobs run --volume. Those of a pool are added.",
    )
    max_timeout_s: float = option(
        MAX_TIMEOUT_S,
        label="Longest deadline",
        unit="s",
        minimum=0,
        exclusive=True,
        scope=Scope.EXECUTOR,
        help="Also the deadline of a job without one",
    )
    endpoint: str | None = option(
        None, label="Endpoint", scope=Scope.EXECUTOR, help="Address of the Hub"
    )
    request_timeout_s: float = request_timeout()
    poll_s: float = poll_interval(5.0, help="How often a caller that waits for jobs polls them")
