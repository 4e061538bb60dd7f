"""Files that are sent while they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse


def attachment(
    request: HttpRequest, body: Iterator[bytes], *, name: str, content_type: str, database: bool
) -> StreamingHttpResponse:
    """``body`` as the file ``name``. With ``database``, it is read in the thread of the request,
    which owns the database connection."""
    # Under ASGI, Django reads a synchronous iterator to its end before it sends the first byte.
    asynchronous = isinstance(request, ASGIRequest)
    content = _in_thread(body, thread_sensitive=database) if asynchronous else body
    response = StreamingHttpResponse(content, content_type=content_type)
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["X-Accel-Buffering"] = "no"  # disables buffering in nginx
    return response


async def _in_thread(body: Iterator[bytes], *, thread_sensitive: bool) -> AsyncIterator[bytes]:
    """Read each chunk in a thread."""
    read = sync_to_async(lambda: next(body, None), thread_sensitive=thread_sensitive)
    while (chunk := await read()) is not None:
        yield chunk
