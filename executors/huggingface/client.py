"""The Hub's client as :mod:`executors.huggingface.executor` needs it: calls that end, and errors
that say what helps.

``huggingface_hub`` has one HTTP client for the whole process, without timeouts. Ours apply only to
calls made here: a request hook reads them from a context variable. ``HfApi.list_jobs`` repeats a
failed request for half a minute and sleeps out rate limits, which would hold a worker, so the same
request is made by :meth:`Hub.jobs` once, through the library's client, headers and types.

API: https://huggingface.co/docs/huggingface_hub/guides/jobs
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar

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

from executors.base import ExecutorError, LaunchRefused, NeedsPerson, NoCapacity, RetryLater
from executors.launching import RETRY_AFTER_CAP_S, retry_after_s, scrub
from executors.refusals import is_capacity_message

AT_ONCE = 16

_A_PERSON = (401, 402, 403, 404)
_LATER = (408, 425, 429)

_patience_s: ContextVar[float | None] = ContextVar("hub_patience_s", default=None)

_T = TypeVar("_T")
_R = TypeVar("_R")


class Hub:
    """One token at one endpoint. ``token`` None lets the library find its own."""

    def __init__(self, *, token: str | None, endpoint: str | None, patience_s: float) -> None:
        self.api = _api(token, endpoint)
        self.patience_s = patience_s
        self.token = token

    @contextlib.contextmanager
    def calling(self, hidden: Iterable[str] = ()) -> Iterator[HfApi]:
        """Make calls within; what goes wrong is raised as an :class:`ExecutorError` without the
        ``hidden`` words. Not to be held over a ``yield``."""
        hooks = get_session().event_hooks["request"]
        if _limit not in hooks:
            hooks.append(_limit)
        before = _patience_s.set(self.patience_s)
        try:
            yield self.api
        except ExecutorError:
            raise
        except Exception as error:
            told = _translated(error, self.api.endpoint)
            if told is None:
                raise
            told.args = (scrub(str(told), [*hidden, self.token or ""]),)
            # Not from error: what it carries, and a traceback prints, has the words in it.
            raise told from None
        finally:
            _patience_s.reset(before)

    def user(self) -> str:
        """Whose token it is; asked once in this process, because the Hub limits that strictly."""
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
        """Jobs with all of these labels, at any of these stages or, without, at all; newest first.
        ``since``: pages of older jobs are not read.

        ``GET /api/jobs/{namespace}``, as ``HfApi.list_jobs`` asks it. What comes is held against
        what was asked for: a filter that were ignored would give us strangers' jobs.
        """
        found: dict[str, JobInfo] = {}  # a job may move to the next page meanwhile
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
                found.update((job.id, job) for job in page)
                url, params = response.links.get("next", {}).get("url"), None
                if since is not None and page and _is_before(page[-1], since):
                    break
        return [
            job
            for job in found.values()
            if labels.items() <= (job.labels or {}).items()
            and (not wanted or str(job.status.stage) in wanted)
        ]


def _is_before(job: JobInfo, moment: datetime) -> bool:
    return job.created_at is not None and job.created_at < moment


def each(call: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """``call`` of every item, several at once; all are tried, then the first error is raised."""
    listed = list(items)
    if len(listed) <= 1:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(AT_ONCE, len(listed)), thread_name_prefix="hub") as pool:
        futures = [pool.submit(call, item) for item in listed]
    return [future.result() for future in futures]


@functools.lru_cache(maxsize=64)
def _api(token: str | None, endpoint: str | None) -> HfApi:
    """One for each credential: it remembers whose token that is."""
    return HfApi(token=token, endpoint=endpoint, library_name="archipelago")


def _limit(request: httpx2.Request) -> None:
    patience_s = _patience_s.get()
    asked: Mapping[str, Any] = request.extensions.get("timeout") or {}
    if patience_s is not None and asked.get("read") is None:
        request.extensions["timeout"] = httpx2.Timeout(patience_s).as_dict()


def _translated(error: Exception, endpoint: str) -> ExecutorError | None:
    if isinstance(error, HfHubHTTPError):
        return _refusal(error)
    if isinstance(error, LocalTokenNotFoundError | OfflineModeIsEnabled):
        return NeedsPerson(str(error))
    if isinstance(error, httpx2.HTTPError):
        return RetryLater(f"{endpoint}: {str(error) or type(error).__name__}")
    if isinstance(error, json.JSONDecodeError):
        return RetryLater(f"{endpoint}: expected JSON, found {error.doc[:80]!r}")
    if isinstance(error, HFValidationError | HfUriError):
        return LaunchRefused(str(error))
    return None


def _refusal(error: HfHubHTTPError) -> ExecutorError:
    """Classify an answer of 4xx or 5xx.

    A full backend is retried whatever its status is: hardware that is unavailable, or a limit of
    concurrent jobs. 404 outside of a job's own address means a namespace that does not exist or
    that the token cannot see.
    """
    response = error.response
    status = response.status_code
    text = (error.server_message or str(error)).strip()
    message = f"{status} {response.reason_phrase}: {text}"
    after_s = _after_s(response.headers)
    if status not in (401, 402, 429) and is_capacity_message(text):
        return NoCapacity(message, after_s=after_s)
    if status in _A_PERSON:
        return NeedsPerson(message)
    if status in _LATER or status >= 500:
        if error.request_id:
            message += f" (request {error.request_id})"
        return RetryLater(message, after_s=after_s)
    return LaunchRefused(message)


def _after_s(headers: Mapping[str, str]) -> float | None:
    """How long the Hub asks us to wait (https://huggingface.co/docs/hub/rate-limits)."""
    window = parse_ratelimit_headers(headers)
    if window is not None and window.remaining == 0:
        return min(float(window.reset_in_seconds), RETRY_AFTER_CAP_S)
    return retry_after_s(headers.get("retry-after"))
