"""Many ranged reads, a bounded number ahead of the one who uses them.

The reduce reads every payload range by range and in a fixed order; over a network one request at
a time leaves most of the bandwidth unused. Left out: trying again and verifying, which belong to
the store beneath (:class:`diloco.store.retry.RetryingStore`) and to the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from diloco.protocol.records import BadRecord, Record
from diloco.store.base import MissingKey, Store

R = TypeVar("R", bound=Record)

RECORDS_IN_FLIGHT = 8
"""Small objects read at once by :func:`read_each`."""

Range: TypeAlias = tuple[str, int, int]
"""Key, start and length in bytes."""


def read_parts(store: Store, requests: Iterable[Range], *, in_flight: int = 4) -> Iterator[bytes]:
    """The ranges in the order asked for, ``in_flight`` of them being read ahead.

    At most ``in_flight + 1`` ranges are in memory, the one the caller has included. An exception
    of a read is raised where its range would have come, after every earlier one. When the iterator
    ends, fails or is closed, reads not yet begun are dropped and the threads have ended.
    """
    if in_flight < 1:
        raise ValueError(f"expected at least 1 read in flight, found {in_flight}")
    pool = ThreadPoolExecutor(in_flight, thread_name_prefix="read_parts")
    ahead: deque[Future[bytes]] = deque()
    try:
        for key, start, length in requests:
            full = len(ahead) == in_flight
            if full:
                ahead[0].exception()  # wait: only a range that is there makes room for another
            ahead.append(pool.submit(store.get_range, key, start, length))
            if full:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_each(store: Store, kind: type[R], keys: Sequence[str]) -> dict[str, R | BadRecord]:
    """Records, read side by side: on a distant bucket their latencies do not add up. A key that is
    not there is left out, an object that is no such record is its error; any other error is
    raised."""

    def get(key: str) -> R | BadRecord | None:
        try:
            return kind.read(store, key)
        except MissingKey:
            return None
        except BadRecord as error:
            return error

    if len(keys) < 2:
        found = [get(key) for key in keys]
    else:
        with ThreadPoolExecutor(min(RECORDS_IN_FLIGHT, len(keys)), "read_each") as pool:
            found = list(pool.map(get, keys))
    return {key: one for key, one in zip(keys, found, strict=True) if one is not None}
