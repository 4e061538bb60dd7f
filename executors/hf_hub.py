"""The Hub's client as :mod:`executors.hf_jobs` needs it: calls that end, and errors that say what
helps.

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

from executors.base import ExecutorError, LaunchRefused, NeedsPerson, RetryLater
from executors.common import scrub

AT_ONCE = 16

_A_PERSON = (401, 402, 403)
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
        self, namespace: str, *, labels: Mapping[str, str], stages: Iterable[str] = ()
    ) -> list[JobInfo]:
        """Jobs with all of these labels, at any of these stages or, without, at all; newest first.

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
                for told in response.json():
                    found[told["id"]] = JobInfo(**told, endpoint=api.endpoint)
                url, params = response.links.get("next", {}).get("url"), None
        return [
            job
            for job in found.values()
            if labels.items() <= (job.labels or {}).items()
            and (not wanted or str(job.status.stage) in wanted)
        ]


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
    response = error.response
    status = response.status_code
    words = (error.server_message or str(error)).strip()
    said = f"{status} {response.reason_phrase}: {words}"
    if status in _A_PERSON:
        return NeedsPerson(said)
    if status in _LATER or status >= 500:
        if error.request_id:
            said += f" (request {error.request_id})"
        return RetryLater(said, after_s=_after_s(response.headers))
    return LaunchRefused(said)


def _after_s(headers: Mapping[str, str]) -> float | None:
    """How long the Hub asks us to wait (https://huggingface.co/docs/hub/rate-limits)."""
    window = parse_ratelimit_headers(headers)
    if window is not None and window.remaining == 0:
        return float(window.reset_in_seconds)
    told = headers.get("retry-after", "")
    return float(told) if told.isdigit() else None
