"""Modal's control plane on one machine, with Sandboxes as processes.

A gRPC server of the methods of :mod:`tests.emulators.modal_api`, with the messages of Modal's
client (``modal_proto``). Set ``MODAL_SERVER_URL`` to its address, and ``MODAL_TOKEN_ID`` and
``MODAL_TOKEN_SECRET`` to :attr:`ModalServer.token`. ``POST /_emulator/<fault>`` on the same port,
with keyword arguments as JSON, injects one of :data:`FAULTS`.

The state survives :meth:`ModalServer.stop`, but not the process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpclib.const
from google.protobuf.message_factory import GetMessageClass
from grpclib import GRPCError, Status
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from modal_proto import api_pb2

from tests.emulators.faults import RequestFaults
from tests.emulators.modal_api import ModalApi
from tests.emulators.processes import Processes

FAULTS = ("preempt", "oom", "lose", "refuse_quota", "slow", "starve", "build", "limit")
"""Methods of :class:`ModalServer` that a request can call."""

TOKEN = ("ak-emulated", "as-emulated")
_SERVICE = api_pb2.DESCRIPTOR.services_by_name["ModalClient"]


class ModalServer:
    """One emulated Modal with one account, on a loopback port; 0 selects a free one."""

    def __init__(self, folder: Path, *, port: int = 0, token: tuple[str, str] = TOKEN) -> None:
        self.port = port
        self.token = token
        self.processes = Processes(folder)
        self.api = ModalApi(self.processes)
        self.api.tokens[token[0]] = token[1]
        self._slow_s = 0.0
        self.faults = RequestFaults()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="modal", daemon=True)
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> int:
        return self.api.requests

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.transports) if self._server else 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.processes.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Availability

    def start(self) -> None:
        if self._server is None:
            self._do(self._start())

    def stop(self) -> None:
        """Close open connections and refuse new ones. Jobs continue."""
        server, self._server = self._server, None
        if server is not None:
            self._do(server.end())

    def slow(self, seconds: float) -> None:
        """Delay every response by ``seconds``."""
        self._slow_s = seconds

    # Faults

    def preempt(self, sandbox_id: str, *, as_termination: bool = False) -> None:
        """Reclaim the machine, reported as an internal failure (as for functions) or as a
        termination."""
        self.api.sandboxes[sandbox_id].stopped_from_outside = as_termination
        self.processes.kill(sandbox_id, "preempted")

    def oom(self, sandbox_id: str) -> None:
        self.processes.kill(sandbox_id, "oom", grace_s=0)

    def lose(self, sandbox_id: str) -> None:
        """Delete a Sandbox and its record."""
        with self.api.lock:
            del self.api.sandboxes[sandbox_id]
        self.processes.forget(sandbox_id)

    def refuse_quota(self, message: str | None) -> None:
        self.api.quota = message

    def limit(self, sandboxes: int | None) -> None:
        """Limit of concurrent Sandboxes of the workspace; None for no limit."""
        self.api.limit = sandboxes

    def starve(self, starved: bool = True) -> None:
        """Make Sandboxes with a GPU wait; False starts them."""
        self.api.starved = starved
        if not starved:
            for job in self.processes.all():
                if job.state == "pending":
                    self.processes.begin(job.id)

    def build(self, *, building: bool = False, error: str = "") -> None:
        """Keep image builds running until ``building`` is False, or fail them with ``error``."""
        self.api.building, self.api.build_error = building, error

    # The server

    async def _start(self) -> None:
        self._server = _Server(self._method_of, self._post)
        self.port = await self._server.listen(self.port)

    def _method_of(self, name: str) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def answer(stream: Stream[Any, Any]) -> None:
            request = await stream.recv_message()
            self.api.requests += 1
            await asyncio.sleep(self._slow_s)
            fault = self.faults.of(name)
            if fault == "unavailable":
                raise GRPCError(Status.UNAVAILABLE, "Service unavailable")
            if fault == "drop_before":
                await stream.cancel()
                return
            self.api.authorise(name, stream.metadata)
            method = getattr(self.api, name)
            if inspect.isasyncgenfunction(method):
                async for message in method(request):
                    await stream.send_message(message)
            else:  # in a thread, because some wait for a process
                message = await asyncio.to_thread(method, request)
                if fault == "drop_after":
                    await stream.cancel()
                else:
                    await stream.send_message(message)

        return answer

    def _post(self, path: str, body: bytes) -> dict[str, Any]:
        """Inject a fault; runs in a thread. Raises :class:`LookupError` for an unknown name."""
        fault = path.removeprefix("/_emulator/")
        if path == fault or fault not in FAULTS:
            raise LookupError(f"expected /_emulator/ and one of {', '.join(FAULTS)}, found {path}")
        getattr(self, fault)(**json.loads(body or b"{}"))
        return {"done": fault}

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class _Server(Server):
    """gRPC and, for ``POST /_emulator/...``, HTTP/1.1, whose connections can be closed."""

    def __init__(
        self,
        method_of: Callable[[str], Callable[[Stream[Any, Any]], Awaitable[None]]],
        post: Callable[[str, bytes], dict[str, Any]],
    ) -> None:
        self._methods = {
            f"/{_SERVICE.full_name}/{method.name}": grpclib.const.Handler(
                method_of(method.name),
                (
                    grpclib.const.Cardinality.UNARY_STREAM
                    if method.server_streaming
                    else grpclib.const.Cardinality.UNARY_UNARY
                ),
                GetMessageClass(method.input_type),
                GetMessageClass(method.output_type),
            )
            for method in _SERVICE.methods
            if hasattr(ModalApi, method.name)
        }
        super().__init__([self], config=Configuration(http2_connection_window_size=2**24))
        self._post = post
        self.transports: set[asyncio.BaseTransport] = set()

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        return self._methods

    async def listen(self, port: int) -> int:
        deadline = time.monotonic() + 10
        while True:
            try:
                self._server = await asyncio.get_running_loop().create_server(
                    lambda: _Connection(self, self._protocol_factory()), "127.0.0.1", port
                )
            except OSError:  # some connections of the previous server are still open
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
            else:
                return int(self._server.sockets[0].getsockname()[1])

    async def end(self) -> None:
        assert self._server is not None
        self._server.close()
        for handler in self._handlers:
            handler.close()
        for transport in list(self.transports):
            transport.abort()  # type: ignore[attr-defined]
        await asyncio.gather(*(handler.wait_closed() for handler in self._handlers))

    async def control(self, request: bytes) -> bytes:
        """The response to an HTTP/1.1 request."""
        head, _, body = request.partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        try:
            answer, status = await asyncio.to_thread(self._post, path, body), "200 OK"
        except (LookupError, TypeError, ValueError) as error:
            answer, status = {"error": str(error)}, "404 Not Found"
        text = json.dumps(answer)
        return (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}"
        ).encode()


class _Connection(asyncio.Protocol):
    """Selects HTTP/2 or HTTP/1.1 by the first bytes, and answers HTTP/1.1 itself."""

    def __init__(self, server: _Server, http2: H2Protocol) -> None:
        self.server = server
        self.http2 = http2
        self.seen = b""
        self.is_http2 = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.server.transports.add(transport)

    def data_received(self, data: bytes) -> None:
        if self.is_http2:
            self.http2.data_received(data)
            return
        self.seen += data
        if self.seen.startswith(b"PRI * "):
            self.is_http2 = True
            self.http2.connection_made(self.transport)
            self.http2.data_received(self.seen)
        elif self.seen.startswith(b"POST ") and self._complete():
            self.task = asyncio.ensure_future(self._answer())

    def _complete(self) -> bool:
        head, separator, body = self.seen.partition(b"\r\n\r\n")
        lengths = [
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        return bool(separator) and len(body) >= (lengths or [0])[0]

    async def _answer(self) -> None:
        answer = await self.server.control(self.seen)
        self.transport.write(answer)
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.server.transports.discard(self.transport)
        if self.is_http2:
            self.http2.connection_lost(error)

    def pause_writing(self) -> None:
        if self.is_http2:
            self.http2.pause_writing()

    def resume_writing(self) -> None:
        if self.is_http2:
            self.http2.resume_writing()
