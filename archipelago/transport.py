"""HTTP requests to the API, and the mapping of their failures to the client's errors.

Redirects are not followed: the token would be sent to another host. Idempotent requests are retried
if the server does not respond or is not ready (502, 503, 504).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from archipelago.errors import (
    ApiError,
    Conflict,
    FieldProblem,
    Invalid,
    LoginNeeded,
    NotFound,
    Refused,
    Unreachable,
)

NOT_READY = frozenset({502, 503, 504})
CHUNK = 1 << 16
_ERRORS = {401: LoginNeeded, 403: Refused, 404: NotFound, 409: Conflict}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


@dataclass(frozen=True, kw_only=True)
class Http:
    """A connection to one server. ``url`` is its base URL, without ``/api``."""

    url: str
    token: str
    timeout_s: float = 30.0
    tries: int = 4
    sleep: Callable[[float], None] = time.sleep

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool | None = None,
    ) -> tuple[int, Any]:
        """Status and parsed JSON of one request. ``body`` is sent as JSON, ``data`` unchanged.
        ``again``: whether the request can be retried; by default only GET is."""
        kind = {} if body is None else {"Content-Type": "application/json"}
        sent = data if body is None else json.dumps(body).encode()
        with self._open(method, path, query, sent, kind | dict(headers or {}), again) as response:
            content = _read(response)
            try:
                return response.status, json.loads(content)
            except ValueError:
                raise ApiError(
                    f"expected JSON from {self.url}{path}, found {content[:60]!r}: is it an "
                    "Archipelago server?",
                    status=response.status,
                ) from None

    def stream(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """The body of a GET, in chunks. Raises :class:`Unreachable` if it is truncated."""
        with self._open("GET", path, query, None, {}, True) as response:
            while chunk := _read(response, CHUNK):
                yield chunk

    @contextlib.contextmanager
    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        data: bytes | None,
        headers: Mapping[str, str],
        again: bool | None,
    ) -> Iterator[http.client.HTTPResponse]:
        request = urllib.request.Request(  # noqa: S310 -- http and https only: see Client
            f"{self.url}/api{path}{_query(query)}",
            method=method,
            data=data,
            headers={
                "Authorization": f"Bearer {self.token}",
                "Accept": "*/*",
                "User-Agent": "archipelago-cli",
                **headers,
            },
        )
        tries = self.tries if (method == "GET" if again is None else again) else 1
        with self._answer(request, tries) as response:
            yield response

    def _answer(self, request: urllib.request.Request, tries: int) -> http.client.HTTPResponse:
        for attempt in range(tries):
            last = attempt == tries - 1
            try:
                response: http.client.HTTPResponse = _opener.open(request, timeout=self.timeout_s)
                return response
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in NOT_READY or last:
                        raise _error_of(error, request.full_url) from None
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                if last:
                    reason = getattr(error, "reason", None) or error
                    raise Unreachable(f"{self.url} does not respond: {reason}") from None
            self.sleep(0.5 * 2**attempt * random.uniform(0.5, 1.5))
        raise AssertionError("at least one try")


def _read(response: http.client.HTTPResponse, size: int | None = None) -> bytes:
    try:
        return response.read(size)
    except (http.client.HTTPException, OSError) as error:
        raise Unreachable(f"the connection was lost while reading: {error!r}") from None


def _query(query: Mapping[str, Any] | None) -> str:
    parameters = {k: v for k, v in (query or {}).items() if v is not None and v != "" and v != []}
    return f"?{urlencode(parameters, doseq=True)}" if parameters else ""


def _error_of(error: urllib.error.HTTPError, url: str) -> ApiError:
    status = error.code
    try:
        body = json.loads(error.read())
        detail = str(body["detail"])
        problems = tuple(
            FieldProblem(**{k: p.get(k) for k in ("field", "message", "expected", "found")})
            for p in body.get("errors", ())
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        detail, problems = f"{status} {error.reason}", ()
    if 300 <= status < 400:
        location = error.headers.get("Location", "elsewhere")
        return ApiError(f"expected the API at {url}, found a redirect to {location}", status=status)
    if status in _ERRORS:
        return _ERRORS[status](detail, status=status)
    if status in (400, 413, 422):
        return Invalid(detail, status=status, problems=problems)
    if status in NOT_READY:
        return Unreachable(f"{url} is not ready: {detail}", status=status)
    return ApiError(f"{url}: {detail}", status=status)
