"""What the stores share to write one object out of parts that a caller makes.

The caller's iterator runs in the caller's thread, whatever the store's client does meanwhile: it
may read from the same store, and the interpreter's thread-local state stays the caller's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.store.base import Data, MakeParts


class StreamedParts:
    """The parts of one stream for a store's ``put_stream``, which maps its client's errors: those
    of the caller's iterator must come out as they are."""

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

    def pass_to(self, upload: Callable[[StreamedParts], None]) -> None:
        """Calls ``upload``; raises the iterator's exception in place of what became of it."""
        try:
            upload(self)
            return
        except BaseException:
            if self._error is None:
                raise
        raise self._error  # out here, where the other exception is not its context


class _Abandoned(Exception):
    """Ends an upload whose parts will not all come."""


def upload_behind(parts: Iterable[Data], upload: Callable[[Iterator[Data]], None]) -> None:
    """Runs ``upload`` in a thread, on parts iterated here; one is made while others are uploaded.

    When ``parts`` raises, so does the iterator that ``upload`` reads, and then this function; when
    ``upload`` raises, no further part is asked for. The thread has ended on return.
    """
    handed: queue.SimpleQueue[Data | BaseException | None] = queue.SimpleQueue()
    room = threading.Semaphore(1)

    def taken() -> Iterator[Data]:
        while (part := handed.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            room.release()
            yield part

    with ThreadPoolExecutor(1, thread_name_prefix="upload_behind") as pool:
        uploading = pool.submit(upload, taken())
        uploading.add_done_callback(lambda _: room.release())
        try:
            for part in parts:
                room.acquire()
                if uploading.done():
                    break
                handed.put(part)
        except BaseException:
            handed.put(_Abandoned())
            raise
        handed.put(None)
        uploading.result()
