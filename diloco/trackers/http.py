"""JSON over HTTP for trackers, with a limit on responses and errors without secrets."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from diloco.trackers.base import Open, TrackerError

TIMEOUT_S = 15.0
BODY_S = 30.0
RESPONSE_LIMIT = 4 * 1024 * 1024
PART_BYTES = 64 * 1024


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Return a redirect like any other error: as a GET without its rows, a request would succeed,
    and its secret would go to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def default_open(request: urllib.request.Request, *, timeout_s: float) -> Any:
    return _opener.open(request, timeout=timeout_s)


class JsonClient:
    """Sends JSON to one server.

    Args:
        base: ``http://`` or ``https://`` address.
        headers: sent with each request, such as ``Authorization``.
        open: replaces ``urllib.request.urlopen``; the server passes one that refuses private
            addresses.
    """

    def __init__(self, base: str, *, headers: dict[str, str], open: Open = default_open) -> None:
        if not base.startswith(("http://", "https://")):
            raise TrackerError(f"expected an address with http:// or https://, found {base[:80]!r}")
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise TrackerError(f"a secret has characters that the header {name} cannot hold")
        self._base = base.rstrip("/")
        self._headers = headers
        self._open = open

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, json.dumps(body, allow_nan=False).encode())

    def get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, None)

    def _request(self, method: str, path: str, data: bytes | None) -> dict[str, Any]:
        try:
            request = urllib.request.Request(  # noqa: S310 -- see __init__
                f"{self._base}/{path}",
                method=method,
                data=data,
                headers={"Content-Type": "application/json", **self._headers},
            )
            with self._open(request, timeout_s=TIMEOUT_S) as response:
                text = self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                raise HttpError(error.code, _detail(error)) from None
        except (
            http.client.HTTPException,
            OSError,
            ValueError,
        ) as error:  # ValueError: no host name
            reason = getattr(error, "reason", None) or error
            raise TrackerError(f"{self._base} does not answer: {reason}") from None
        if len(text) > RESPONSE_LIMIT:
            raise TrackerError(f"{self._base} sent more than {RESPONSE_LIMIT} bytes")
        try:
            answer = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise TrackerError(f"{self._base} sent no JSON object")
        return answer

    def _read(self, response: Any) -> bytes:
        """The body, of which one byte more than the limit is read. A server that sends a few bytes
        at a time never exceeds the time limit of one read."""
        text, end_s = b"", time.monotonic() + BODY_S
        while len(text) <= RESPONSE_LIMIT:
            part = response.read1(min(PART_BYTES, RESPONSE_LIMIT + 1 - len(text)))
            if not part:
                break
            text += part
            if time.monotonic() > end_s:
                raise TrackerError(f"{self._base} did not answer within {BODY_S:.0f} s")
        return text


class HttpError(TrackerError):
    """The server refused a request."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"status {status}: {detail}" if detail else f"status {status}")
        self.status = status
        self.detail = detail


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(500).decode(errors="replace").strip()
    except (http.client.HTTPException, OSError):
        return ""
