"""Helpers of the stores' ``put_stream``, which writes one object from the caller's parts.

The caller's iterator always runs in the caller's thread: it can read from the same store, and
thread-local state of the interpreter stays the caller's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait

from diloco.store.daemon import call_in_daemon

Data = bytes | bytearray | memoryview
MakeParts = Callable[[], Iterable[Data]]


class StreamedParts:
    """The parts of one stream, which records an exception of the caller's iterator so that a
    store's error mapping does not change it."""

    def __init__(self, make_parts: MakeParts) -> None:
        self._make_parts = make_parts
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Data]:
        try:
            yield from self._make_parts()
        except GeneratorExit:
            raise
        except BaseException as error:
            self._error = error
            raise

    def upload_with(self, upload: Callable[[StreamedParts], None]) -> None:
        """Call ``upload``. If the iterator raised, raise its exception instead of the upload's."""
        try:
            upload(self)
            return
        except BaseException:
            if self._error is None:
                raise
        raise self._error  # outside the handler, so that the other exception is not its context


class _Aborted(Exception):
    """Aborts an upload whose producer failed."""


def upload_behind(parts: Iterable[Data], upload: Callable[[Iterator[Data]], None]) -> None:
    """Run ``upload`` in a thread on parts that are iterated here, so that one is produced while
    others are uploaded.

    An exception of ``parts`` is raised by the iterator that ``upload`` reads, and then by this
    function. If ``upload`` raises, no further part is produced. ``upload`` has ended on return.
    Raises :class:`OSError`, which stores retry, if the system starts no thread.
    """
    pending: queue.SimpleQueue[Data | BaseException | None] = queue.SimpleQueue()
    room = threading.Semaphore(1)

    def received() -> Iterator[Data]:
        while (part := pending.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            room.release()
            yield part

    try:
        uploading = call_in_daemon(lambda: upload(received()), name="upload_behind")
    except RuntimeError as error:
        raise OSError(f"expected a thread to upload in, found: {error}") from error
    uploading.add_done_callback(lambda _: room.release())
    try:
        for part in parts:
            room.acquire()
            if uploading.done():
                break
            pending.put(part)
    except BaseException:
        pending.put(_Aborted())
        wait([uploading])
        raise
    pending.put(None)
    uploading.result()
