"""A client of the Hugging Face Hub with timeouts, and with errors of :mod:`executors.base`.

``huggingface_hub`` has one HTTP client per process, without timeouts. A request hook sets the
timeout for calls made here only, from a context variable. ``HfApi.list_jobs`` retries a failed
request for half a minute and sleeps during rate limits, which would block a worker;
:meth:`Hub.jobs` therefore makes the same request once, with the library's client, headers and
types.

API: https://huggingface.co/docs/huggingface_hub/guides/jobs
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import httpx2
from huggingface_hub import HfApi, JobInfo, get_session, hf_raise_for_status
from huggingface_hub.errors import (
    HfHubHTTPError,
    HfUriError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    parse_ratelimit_headers,
)

from executors.base import AccountError, ExecutorError, LaunchRefused, NoCapacity, RetryLater
from executors.launching import RETRY_AFTER_CAP_S, retry_after_s, scrub
from executors.refusals import is_capacity_message

_INTERVENTION = (401, 402, 403, 404)
_LATER = (408, 425, 429)

_patience_s: ContextVar[float | None] = ContextVar("hub_patience_s", default=None)


class Hub:
    """One token at one endpoint. With ``token`` None the library finds its own."""

    def __init__(self, *, token: str | None, endpoint: str | None, patience_s: float) -> None:
        self.api = _api(token, endpoint)
        self.patience_s = patience_s
        self.token = token

    @contextlib.contextmanager
    def calling(self, hidden: Iterable[str] = ()) -> Iterator[HfApi]:
        """Convert errors of the block to :class:`ExecutorError`, without the ``hidden`` values.

        Do not keep the block open across a ``yield``.
        """
        hooks = get_session().event_hooks["request"]
        if _limit not in hooks:
            hooks.append(_limit)
        before = _patience_s.set(self.patience_s)
        try:
            yield self.api
        except ExecutorError:
            raise
        except Exception as error:
            translated = _translated(error, self.api.endpoint)
            if translated is None:
                raise
            translated.args = (scrub(str(translated), [*hidden, self.token or ""]),)
            # Not chained: a traceback would print the hidden values of the cause.
            raise translated from None
        finally:
            _patience_s.reset(before)

    def user(self) -> str:
        """The token's user. Cached per process, because the Hub limits this request strictly."""
        with self.calling() as api:
            return str(api.whoami(cache=True)["name"])

    def jobs(
        self,
        namespace: str,
        *,
        labels: Mapping[str, str],
        stages: Iterable[str] = (),
        since: datetime | None = None,
    ) -> list[JobInfo]:
        """Jobs with all ``labels`` at any of ``stages`` (all if empty), newest first.

        ``GET /api/jobs/{namespace}``, as in ``HfApi.list_jobs``. The filters are applied again to
        the response, because an ignored filter would return jobs of others.

        Args:
            since: do not read pages with older jobs only.
        """
        by_id: dict[str, JobInfo] = {}  # a job can move to the next page between two requests
        wanted = tuple(stages)
        url: str | None = f"{self.api.endpoint}/api/jobs/{namespace}"
        params: list[tuple[str, str | int | float | bool | None]] | None = [
            *(("stage", stage) for stage in wanted),
            *(("label", f"{name}={value}") for name, value in labels.items()),
        ]
        with self.calling() as api:
            while url:
                response = get_session().get(
                    url, params=params, headers=build_hf_headers(token=api.token)
                )
                hf_raise_for_status(response)
                page = [JobInfo(**job, endpoint=api.endpoint) for job in response.json()]
                by_id.update((job.id, job) for job in page)
                url, params = response.links.get("next", {}).get("url"), None
                if since is not None and page and _is_before(page[-1], since):
                    break
        return [
            job
            for job in by_id.values()
            if labels.items() <= (job.labels or {}).items()
            and (not wanted or str(job.status.stage) in wanted)
        ]


def _is_before(job: JobInfo, moment: datetime) -> bool:
    return job.created_at is not None and job.created_at < moment


@functools.lru_cache(maxsize=64)
def _api(token: str | None, endpoint: str | None) -> HfApi:
    """One client for each credential, because it caches the token's user."""
    return HfApi(token=token, endpoint=endpoint, library_name="archipelago")


def _limit(request: httpx2.Request) -> None:
    patience_s = _patience_s.get()
    timeouts: Mapping[str, Any] = request.extensions.get("timeout") or {}
    if patience_s is not None and timeouts.get("read") is None:
        request.extensions["timeout"] = httpx2.Timeout(patience_s).as_dict()


def _translated(error: Exception, endpoint: str) -> ExecutorError | None:
    if isinstance(error, HfHubHTTPError):
        return _refusal(error)
    if isinstance(error, LocalTokenNotFoundError | OfflineModeIsEnabled):
        return AccountError(str(error))
    if isinstance(error, httpx2.HTTPError):
        return RetryLater(f"{endpoint}: {str(error) or type(error).__name__}")
    if isinstance(error, json.JSONDecodeError):
        return RetryLater(f"{endpoint}: expected JSON, found {error.doc[:80]!r}")
    if isinstance(error, HFValidationError | HfUriError):
        return LaunchRefused(str(error))
    return None


def _refusal(error: HfHubHTTPError) -> ExecutorError:
    """Classify a response of 4xx or 5xx.

    A full backend (unavailable hardware, a limit of concurrent jobs) is retried with any status.
    404 outside a job's own address means a namespace that does not exist or that the token cannot
    access.
    """
    response = error.response
    status = response.status_code
    text = (error.server_message or str(error)).strip()
    message = f"{status} {response.reason_phrase}: {text}"
    after_s = _after_s(response.headers)
    if status not in (401, 402, 429) and is_capacity_message(text):
        return NoCapacity(message, after_s=after_s)
    if status in _INTERVENTION:
        return AccountError(message)
    if status in _LATER or status >= 500:
        if error.request_id:
            message += f" (request {error.request_id})"
        return RetryLater(message, after_s=after_s)
    return LaunchRefused(message)


def _after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until the rate limit resets (https://huggingface.co/docs/hub/rate-limits)."""
    window = parse_ratelimit_headers(headers)
    if window is not None and window.remaining == 0:
        return min(float(window.reset_in_seconds), RETRY_AFTER_CAP_S)
    return retry_after_s(headers.get("retry-after"))
