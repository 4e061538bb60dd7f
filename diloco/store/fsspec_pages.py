"""Listings of fsspec file systems, one page at a time.

``find`` of an fsspec file system reads a whole listing before it returns. S3, Google Cloud Storage
and Azure have paged listings, so this module makes these requests itself with the file system's
client. Every other file system is listed with ``find``, as one page.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fsspec.asyn import sync

from diloco.store.base import PAGE_OBJECTS

Page = list[tuple[str, int]]
"""Path on the file system, and size in bytes."""


def pages_of(fs: Any, folder: str, find_options: Mapping[str, Any]) -> Iterator[Page]:
    """Yield the objects below ``folder``, a path without protocol and trailing slash."""
    protocol = fs.protocol
    protocols = {protocol} if isinstance(protocol, str) else set(protocol)
    if protocols & {"s3", "s3a"} and not fs.version_aware:
        return _s3_pages(fs, folder)
    if protocols & {"gs", "gcs"}:
        return _gcs_pages(fs, folder)
    if protocols & {"az", "abfs", "abfss"}:
        return _azure_pages(fs, folder)
    return _find(fs, folder, find_options)


def _find(fs: Any, folder: str, options: Mapping[str, Any]) -> Iterator[Page]:
    infos = fs.find(folder, detail=True, withdirs=False, **options)
    yield [(str(path), int(info.get("size") or 0)) for path, info in infos.items()]


def _s3_pages(fs: Any, folder: str) -> Iterator[Page]:
    bucket, _, prefix = folder.partition("/")
    query = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else "", "MaxKeys": PAGE_OBJECTS}
    more: dict[str, Any] = {}
    while True:
        response = fs.call_s3("list_objects_v2", **query, **more, **fs.req_kw)
        yield [(f"{bucket}/{o['Key']}", int(o["Size"])) for o in response.get("Contents", [])]
        if not response.get("IsTruncated"):
            return
        more = {"ContinuationToken": response["NextContinuationToken"]}


def _gcs_pages(fs: Any, folder: str) -> Iterator[Page]:
    bucket, _, prefix = folder.partition("/")
    query: dict[str, Any] = {"maxResults": PAGE_OBJECTS, "prefix": f"{prefix}/" if prefix else None}
    token: str | None = None
    while True:
        response = fs.call("GET", "b/{}/o", bucket, pageToken=token, json_out=True, **query)
        items = response.get("items", [])
        yield [(f"{bucket}/{o['name']}", int(o.get("size") or 0)) for o in items]
        token = response.get("nextPageToken")
        if token is None:
            return


def _azure_pages(fs: Any, folder: str) -> Iterator[Page]:
    container, _, prefix = folder.partition("/")

    async def begin() -> AsyncIterator[Any]:
        client = fs.service_client.get_container_client(container)
        listed = client.list_blobs(
            name_starts_with=f"{prefix}/" if prefix else None,
            include=["metadata"],
            results_per_page=PAGE_OBJECTS,
        )
        pages: AsyncIterator[Any] = listed.by_page()
        return pages

    async def read(pages: AsyncIterator[Any]) -> Page | None:
        try:
            blobs = [blob async for blob in await anext(pages)]
        except StopAsyncIteration:
            return None
        return [
            (f"{container}/{blob.name}", int(blob.size or 0))
            for blob in blobs
            if (blob.metadata or {}).get("hdi_isfolder") != "true"
        ]

    pages = sync(fs.loop, begin)
    while (page := sync(fs.loop, read, pages)) is not None:
        yield page
