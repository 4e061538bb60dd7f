"""Notes the requests of a store, before they are made."""

from __future__ import annotations

from diloco.store.base import LISTED, Data, MakeParts, ObjectInfo


class NotedRequests:
    """Calls :meth:`note` before each request of the store that follows in the order of the base
    classes. Deletions are not noted: a bucket does not charge for them."""

    def note(self, verb: str, key: str, *, length: int | None = None) -> None:
        """Note a request; ``length`` is that of a range."""
        raise NotImplementedError

    def put(self, key: str, data: Data) -> None:
        self.note("PUT", key)
        super().put(key, data)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        self.note("PUT", key)
        super().put_stream(key, make_parts, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> bool:
        self.note("PUT", key)
        return super().create(key, data)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.note("GET", key)
        return super().get(key, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.note("GET", key, length=length)
        return super().get_range(key, start, length)

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self.note("LIST", prefix)
        return super().list(prefix, limit=limit)
