"""A Modal account: SDK clients for explicit credentials, timeouts, and classified errors.

The SDK runs an event loop in its own thread. Its ``.aio`` methods are awaited here in a loop of the
calling thread, so a call that exceeds its timeout is cancelled. The SDK alone would retry an
unreachable control plane for a minute; the limit here is ``timeout_s``.

Each account has its own client, created on first use and again after a fork, which a client does
not survive (https://modal.com/docs/guide/troubleshooting). The SDK reads the server's address when
it creates a client (``MODAL_SERVER_URL``, or the profile of ``~/.modal.toml``).
``MODAL_SERVER_URL`` among the credentials overrides it for this account only.

Not supported: OAuth credentials of a profile. The SDK caches the image builder version of an
environment by its name only, so two accounts of one process share it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpclib.exceptions
import modal
import modal.exception as modal_errors
from modal.config import config
from modal_proto import api_pb2

from executors.base import AccountError, ExecutorError, LaunchRefused, RetryLater
from executors.launching import scrub
from executors.refusals import quota_refusal

TOKEN_ID = "MODAL_TOKEN_ID"  # noqa: S105 (a name)
TOKEN_SECRET = "MODAL_TOKEN_SECRET"  # noqa: S105 (a name)
SERVER_URL = "MODAL_SERVER_URL"
ENVIRONMENT = "MODAL_ENVIRONMENT"

T = TypeVar("T")

_INTERVENTION = (
    modal_errors.AuthError,
    modal_errors.PermissionDeniedError,
    modal_errors.VersionError,
)
_LATER = (
    modal_errors.ConnectionError,
    modal_errors.ServiceError,
    modal_errors.InternalError,
    modal_errors.InternalFailure,
    modal_errors.TimeoutError,
    modal_errors.DataLossError,
    modal_errors.ClientClosed,
    modal_errors.ExecutionError,
    grpclib.exceptions.StreamTerminatedError,
    OSError,
)


class Account:
    """Modal with the credentials of one configuration."""

    def __init__(self, credentials: Mapping[str, str], *, timeout_s: float) -> None:
        self._credentials = dict(credentials)
        self.timeout_s = timeout_s
        self._pid = 0
        self._lock = threading.Lock()
        self._client: modal.Client | None = None
        self._failed: tuple[float, ExecutorError] | None = None

    @property
    def environment(self) -> str:
        return self._credentials.get(ENVIRONMENT, "")

    @property
    def client(self) -> modal.Client:
        """The client of this account in this process, within :meth:`run`."""
        assert self._client is not None
        return self._client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``, whose requests use :meth:`call`, and return its result. Blocks this
        thread."""
        try:
            self._open()
        except BaseException:
            work.close()
            raise
        return _blocking(work)

    def _open(self) -> None:
        """Create the client once. A thread that waited for a failed attempt raises the same
        error."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._client = os.getpid(), threading.Lock(), None
        requested_at_s = time.monotonic()
        with self._lock:
            if self._client is not None:
                return
            if self._failed is not None and self._failed[0] >= requested_at_s:
                raise self._failed[1]
            try:
                self._client = _blocking(self.another())
            except ExecutorError as error:
                self._failed = (time.monotonic(), error)
                raise

    async def call(
        self,
        request: Awaitable[T],
        *,
        timeout_s: float | None = None,
        expect: tuple[type[Exception], ...] = (),
    ) -> T:
        """Await one call of the SDK. Errors in ``expect`` are raised unchanged, all others as an
        :class:`ExecutorError`."""
        limit_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await request
        except Exception as error:
            if isinstance(error, (ExecutorError, *expect)):
                raise
            if isinstance(error, TimeoutError):
                message = f"Modal did not answer within {limit_s:g} s"
                raise RetryLater(str(error) or message) from error
            if isinstance(error, (modal_errors.Error, *_LATER)):
                classified = self.classified(error)
                # A traceback prints the cause, so a scrubbed error is not chained.
                raise classified from (error if str(error) in str(classified) else None)
            raise

    def classified(self, error: BaseException) -> ExecutorError:
        """Convert an error of the SDK."""
        message = scrub(str(error), self._secrets()) or type(error).__name__
        if isinstance(error, _INTERVENTION):
            return AccountError(message)
        if isinstance(error, modal_errors.ResourceExhaustedError):
            # Modal uses one status for quotas, spending limits and rate limits.
            return quota_refusal(message)
        if isinstance(error, modal_errors.NotFoundError):  # an environment, a secret, an image
            return AccountError(message)
        if isinstance(error, _LATER):
            return RetryLater(message)
        return LaunchRefused(message)

    async def another(self) -> modal.Client:
        """Create a separate client, which the caller closes. The SDK connects it at once."""
        token_id, token_secret = self._secrets()
        if not token_id or not token_secret:
            raise AccountError(
                f"Modal: expected a token ({TOKEN_ID} and {TOKEN_SECRET}) in the credential or in "
                "the server's environment, found none"
            )
        url = self._credentials.get(SERVER_URL)
        if not url:
            return await self.call(modal.Client.from_credentials.aio(token_id, token_secret))
        client = modal.Client(url, api_pb2.CLIENT_TYPE_CLIENT, (token_id, token_secret))
        await self.call(client.__aenter__())  # type: ignore[no-untyped-call]
        return client

    def _secrets(self) -> tuple[str, str]:
        own = (self._credentials.get(TOKEN_ID, ""), self._credentials.get(TOKEN_SECRET, ""))
        if any(own):
            return own
        return config.get("token_id") or "", config.get("token_secret") or ""


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:  # this thread already runs an event loop
        return pool.submit(asyncio.run, work).result()
