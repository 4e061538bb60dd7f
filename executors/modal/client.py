"""One Modal account: clients made from our own credentials, calls that end, errors that say what
helps.

The SDK runs an event loop in a thread of its own; its ``.aio`` methods are awaited here in a loop
of the calling thread's, so a call that takes too long is cancelled there instead of left behind.
A control plane that cannot be reached is retried by the SDK for a minute; ours is ``timeout_s``.

Each account has its own client, made when it is first used and again after a fork, because a client
does not survive one (https://modal.com/docs/guide/troubleshooting). The SDK reads the address of
the server whenever a client is made (``MODAL_SERVER_URL``, or the profile of ``~/.modal.toml``);
``MODAL_SERVER_URL`` among the credentials goes before that, for this account only.

Left out: OAuth credentials of a profile. The SDK remembers the image builder version of an
environment by its name alone, so two accounts of one process share it.
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
import modal.exception as told
from modal.config import config
from modal_proto import api_pb2

from executors.base import ExecutorError, LaunchRefused, NeedsPerson, RetryLater
from executors.launching import scrub
from executors.refusals import quota_refusal

TOKEN_ID = "MODAL_TOKEN_ID"  # noqa: S105 (a name)
TOKEN_SECRET = "MODAL_TOKEN_SECRET"  # noqa: S105 (a name)
SERVER_URL = "MODAL_SERVER_URL"
ENVIRONMENT = "MODAL_ENVIRONMENT"

T = TypeVar("T")

_A_PERSON = (told.AuthError, told.PermissionDeniedError, told.VersionError)
_LATER = (
    told.ConnectionError,
    told.ServiceError,
    told.InternalError,
    told.InternalFailure,
    told.TimeoutError,
    told.DataLossError,
    told.ClientClosed,
    told.ExecutionError,
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
        """The result of ``work``, whose calls are made by :meth:`call`. Blocks this thread."""
        try:
            self._open()
        except BaseException:
            work.close()
            raise
        return _blocking(work)

    def _open(self) -> None:
        """Make the client, once: who waited for an attempt that failed takes its failure."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._client = os.getpid(), threading.Lock(), None
        asked_s = time.monotonic()
        with self._lock:
            if self._client is not None:
                return
            if self._failed is not None and self._failed[0] >= asked_s:
                raise self._failed[1]
            try:
                self._client = _blocking(self.another())
            except ExecutorError as error:
                self._failed = (time.monotonic(), error)
                raise

    async def call(
        self,
        answer: Awaitable[T],
        *,
        timeout_s: float | None = None,
        expect: tuple[type[Exception], ...] = (),
    ) -> T:
        """One call of the SDK. Errors of it that are expected are raised as they are, all others
        as an :class:`ExecutorError`."""
        limit_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except Exception as error:
            if isinstance(error, (ExecutorError, *expect)):
                raise
            if isinstance(error, TimeoutError):
                waited = f"Modal did not answer within {limit_s:g} s"
                raise RetryLater(str(error) or waited) from error
            if isinstance(error, (told.Error, *_LATER)):
                said = self.said(error)
                # A traceback shows the cause too: not one that had to be scrubbed.
                raise said from (error if str(error) in str(said) else None)
            raise

    def said(self, error: BaseException) -> ExecutorError:
        """What an error of the SDK means to us."""
        message = scrub(str(error), self._secrets()) or type(error).__name__
        if isinstance(error, _A_PERSON):
            return NeedsPerson(message)
        if isinstance(error, told.ResourceExhaustedError):
            # Modal uses one status for a quota, a spending limit and a rate.
            return quota_refusal(message)
        if isinstance(error, told.NotFoundError):  # an environment, a secret, an image
            return NeedsPerson(message)
        if isinstance(error, _LATER):
            return RetryLater(message)
        return LaunchRefused(message)

    async def another(self) -> modal.Client:
        """A client of its own, for whoever asks to close. The SDK connects it at once."""
        token_id, token_secret = self._secrets()
        if not token_id or not token_secret:
            raise NeedsPerson(
                f"Modal: expected a token ({TOKEN_ID} and {TOKEN_SECRET}) in the credential or in "
                "this server's environment, found none"
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
    with ThreadPoolExecutor(1) as pool:  # this thread has a loop of its own
        return pool.submit(asyncio.run, work).result()
