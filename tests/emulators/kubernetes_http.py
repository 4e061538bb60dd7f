"""The HTTP of the emulated API server: who may do what, paths, lists, logs, and faults.

Unknown fields are refused with ``fieldValidation=Strict``
(:mod:`tests.emulators.kubernetes_schema`). A 429 or 503 can carry ``Retry-After`` in either form,
as RFC 9110 has it: seconds, or a date
(https://kubernetes.io/docs/concepts/cluster-administration/flow-control/).

Bearer tokens are users; what a user may do is a set of (API group, resource, verb), as a Role's
rules are. ``POST /_emulator/<fault>`` with the fault's arguments as JSON calls that method of
:class:`~tests.emulators.kubernetes.KubernetesCluster`: ``{"job": "run-0-1"}`` to ``preempt``.

Left out: watches (answered with 405), and every resource but those of
:mod:`tests.emulators.kubernetes_objects`.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from tests.emulators import kubernetes_schema as schema
from tests.emulators.interruptions import Outcome
from tests.emulators.kubernetes_kubelet import state_of
from tests.emulators.kubernetes_objects import KINDS, Json, Kind, Refused, unix_seconds

if TYPE_CHECKING:
    from tests.emulators.kubernetes import KubernetesCluster

FAULTS = ("preempt", "oom", "lose", "refuse_quota", "slow", "fail")
VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0-emulated"}
KEEP_ALIVE_S = 30.0

_PATH = re.compile(
    r"/api(?:/v1|s/(?P<group>[^/]+)/v1)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>log))?)?"
)
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_REVIEWS = {"selfsubjectaccessreviews", "selfsubjectreviews"}


class Server(ThreadingHTTPServer):
    """Serves a cluster on 127.0.0.1 until :meth:`close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, cluster: KubernetesCluster, port: int) -> None:
        self.cluster = cluster
        self.closing = threading.Event()
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)
        if cluster.tls is not None:
            self.socket = cluster.tls.wrap_socket(self.socket, server_side=True)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Serve no longer, and drop the connections that are open."""
        self.closing.set()
        self.shutdown()
        self.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = KEEP_ALIVE_S
    disable_nagle_algorithm = True

    @property
    def cluster(self) -> KubernetesCluster:
        return cast(Server, self.server).cluster

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal of whoever tests with it."""

    def _answer(self) -> None:
        """Answer one request, or what an interruption makes of it."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        outcome = self.cluster.interruptions.before()
        if outcome is Outcome.DROP:
            self._drop()
            return
        try:
            if outcome is Outcome.REFUSE:
                raise Refused(503, "ServiceUnavailable", "the server is currently unable to handle")
            given = json.loads(body) if body else {}
            if address.path.startswith("/_emulator/"):
                self._send(200, self._fault(address.path.removeprefix("/_emulator/"), given))
                return
            if self.cluster.delay_s:
                time.sleep(self.cluster.delay_s)
            with self.cluster.lock:
                self.cluster.requests += 1
            found = self._found(address.path, query, given)
            if self.cluster.interruptions.after() is Outcome.DROP:
                self._drop()
            elif found is not None:
                self._send(201 if self.command == "POST" else 200, found)
        except Refused as refused:
            if self.cluster.interruptions.after() is Outcome.DROP:
                self._drop()
                return
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": refused.message,
                "reason": refused.reason,
                "code": refused.code,
            }
            self._send(refused.code, status, after_s=refused.after_s)
        except json.JSONDecodeError as error:
            self._send(400, {"kind": "Status", "code": 400, "message": str(error)})

    def _found(self, path: str, query: dict[str, str], given: Json) -> Json | None:
        """The answer, or None where it was sent as a stream."""
        path = path.rstrip("/")
        if path == "/version":
            return VERSION
        user = self._user()
        self.cluster.fail_if_told()
        if path in _DISCOVERY:
            return _DISCOVERY[path]
        match = _PATH.fullmatch(path)
        if match is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        resource, name = match["resource"], match["name"] or ""
        if resource in _REVIEWS:
            return self._review(resource, user, given)
        kind = KINDS.get(resource)
        if kind is None or kind.group != (match["group"] or ""):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace = match["namespace"] or ""
        verb = _VERBS.get(self.command, "get" if name else "list")
        if match["sub"]:
            verb, asked = "get", f"{resource}/{match['sub']}"
        else:
            asked = resource
        self._permit(user, kind, asked, verb, namespace)
        if match["sub"]:
            self._log(self.cluster.objects.get("pods", namespace, name), query)
            return None
        return self._act(kind, verb, namespace, name, query, given)

    def _act(
        self, kind: Kind, verb: str, namespace: str, name: str, query: dict[str, str], given: Json
    ) -> Json:
        objects, resource = self.cluster.objects, kind.resource
        if query.get("watch") in ("1", "true"):
            raise Refused(405, "MethodNotAllowed", "watches are not emulated")
        if verb in ("create", "patch"):
            found_wrong = schema.problems(resource, given, is_patch=verb == "patch")
            if found_wrong and query.get("fieldValidation") == "Strict":
                said = f"strict decoding error: {', '.join(found_wrong)}"
                raise Refused(400, "BadRequest", said)
        if verb == "create":
            self.cluster.admit(resource, namespace, given)
            return objects.create(resource, namespace, given, dry_run="dryRun" in query)
        if verb == "patch":
            if self.headers.get("Content-Type", "") not in _PATCHES:
                said = f"the body of the request was in an unknown format - accepted: {_PATCHES}"
                raise Refused(415, "UnsupportedMediaType", said)
            return objects.patch(resource, namespace, name, given)
        with objects.changed:
            if verb == "list":
                return self._page(kind, namespace, query)
            found = objects.get(resource, namespace, name)
            if verb == "get":
                return cast(Json, json.loads(json.dumps(found)))
            wanted = (given.get("preconditions") or {}).get("uid")
            if wanted and wanted != found["metadata"]["uid"]:
                raise Refused(
                    409, "Conflict", f"the UID in the precondition ({wanted}) does not match"
                )
            if resource == "pods":
                self.cluster.kubelet.delete(found)
            else:
                policy = given.get("propagationPolicy") or query.get("propagationPolicy")
                objects.delete(resource, namespace, name, policy or "Background")
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _page(self, kind: Kind, namespace: str, query: dict[str, str]) -> Json:
        items = self.cluster.objects.all(
            kind.resource,
            namespace,
            labels=query.get("labelSelector", ""),
            fields=query.get("fieldSelector", ""),
        )
        start = int(query.get("continue") or 0)
        end = start + int(query.get("limit") or len(items) or 1)
        meta = {"resourceVersion": self.cluster.objects.version}
        if end < len(items):
            meta["continue"] = str(end)
        listed = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta}
        return cast(Json, json.loads(json.dumps(listed | {"items": items[start:end]})))

    def _user(self) -> str:
        given = self.headers.get("Authorization", "")
        scheme, _, token = given.partition(" ")
        user = self.cluster.tokens.get(token) if scheme.lower() == "bearer" else None
        if user is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        return user

    def _permit(self, user: str, kind: Kind, resource: str, verb: str, namespace: str) -> None:
        with self.cluster.lock:
            self.cluster.asked.add((kind.group, resource, verb))
        if self.cluster.may(user, kind.group, resource, verb):
            return
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        raise Refused(
            403,
            "Forbidden",
            f'{kind.qualified} is forbidden: User "{user}" cannot {verb} resource "{resource}" in '
            f'API group "{kind.group}" {where}',
        )

    def _review(self, resource: str, user: str, given: Json) -> Json:
        if resource == "selfsubjectreviews":
            return given | {"status": {"userInfo": {"username": user}}}
        asked = given["spec"]["resourceAttributes"]
        name = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        allowed = self.cluster.may(user, asked.get("group", ""), name, asked["verb"])
        return given | {"status": {"allowed": allowed}}

    def _fault(self, name: str, given: Json) -> Json:
        if name not in FAULTS:
            raise Refused(404, "NotFound", f"expected a fault of {', '.join(FAULTS)}, found {name}")
        try:
            getattr(self.cluster, name)(**given)
        except (KeyError, TypeError) as error:
            raise Refused(400, "BadRequest", str(error)) from error
        return {}

    def _log(self, pod: Json, query: dict[str, str]) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]["name"]
        if query.get("container", container) != container:
            said = f"container {query['container']} is not valid for pod {meta['name']}"
            raise Refused(400, "BadRequest", said)
        waiting = state_of(pod).get("waiting")
        if waiting is not None or not state_of(pod):
            reason = (waiting or {}).get("reason", "ContainerCreating")
            said = f'container "{container}" in pod "{meta["name"]}" is waiting to start: {reason}'
            raise Refused(400, "BadRequest", said)
        since = unix_seconds(query["sinceTime"]) if "sinceTime" in query else 0.0
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for wall_s, text in self._lines(meta["uid"], follow=query.get("follow") == "true"):
            if wall_s < int(since):
                continue
            stamp = f"{_nanoseconds(wall_s)} " if query.get("timestamps") == "true" else ""
            line = f"{stamp}{text}\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def _lines(self, process: str, *, follow: bool) -> Iterator[tuple[float, str]]:
        processes, read = self.cluster.kubelet.processes, 0
        with contextlib.suppress(KeyError):  # the pod was removed meanwhile
            while True:
                # Taken before reading, so that no line is waited for that is there.
                seen = processes.get(process)
                for number, wall_s, text in processes.log_lines(process, read):
                    read = number
                    yield wall_s, text
                if not follow or seen.state == "ended":
                    return
                if cast(Server, self.server).closing.is_set():
                    raise ConnectionAbortedError
                processes.wait_change(process, 0.5, after=seen.changes)

    def _drop(self) -> None:
        """Close the connection without an answer."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, code: int, found: Json, *, after_s: int | str | None = None) -> None:
        body = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if after_s is not None:
            self.send_header("Retry-After", str(after_s))
        self.end_headers()
        self.wfile.write(body)


def _nanoseconds(wall_s: float) -> str:
    whole = datetime.fromtimestamp(int(wall_s), UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{int(wall_s * 1e9) % 1_000_000_000:09}Z"


def _resources(group: str) -> Json:
    """What ``kubectl`` asks first: which resources there are."""
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/v1" if group else "v1",
        "resources": [
            {
                "name": kind.resource,
                "singularName": kind.kind.lower(),
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": ["create", "delete", "get", "list", "patch"],
                "shortNames": list(kind.short),
            }
            for kind in KINDS.values()
            if kind.group == group
        ],
    }


_BATCH = {"groupVersion": "batch/v1", "version": "v1"}
_DISCOVERY: dict[str, Json] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "batch", "versions": [_BATCH], "preferredVersion": _BATCH}],
    },
    "/api/v1": _resources(""),
    "/apis/batch/v1": _resources("batch"),
}
