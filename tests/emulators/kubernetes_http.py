"""The HTTP API of the emulated cluster: permissions, paths, lists, logs, and faults.

Unknown fields are refused with ``fieldValidation=Strict``
(:mod:`tests.emulators.kubernetes_schema`). A 429 or 503 can carry ``Retry-After`` in either form,
as RFC 9110 has it: seconds, or a date
(https://kubernetes.io/docs/concepts/cluster-administration/flow-control/).

Bearer tokens are users; a user's permissions are a set of (API group, resource, verb), like the
rules of a Role. ``POST /_emulator/<fault>`` with the fault's arguments as JSON calls that method of
:class:`~tests.emulators.kubernetes.KubernetesCluster`: ``{"job": "run-0-1"}`` to ``preempt``.

Not emulated: watches (answered with 405), and every resource but those of
:mod:`tests.emulators.kubernetes_objects`.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qs

from tests.emulators import kubernetes_schema as schema
from tests.emulators.faults import HangUp
from tests.emulators.http_server import Exchange, inject
from tests.emulators.interruptions import Outcome
from tests.emulators.kubernetes_kubelet import state_of
from tests.emulators.kubernetes_objects import KINDS, Json, Kind, Refused, unix_seconds

if TYPE_CHECKING:
    from tests.emulators.kubernetes import KubernetesCluster

FAULTS = ("preempt", "oom", "lose", "refuse_quota", "slow", "fail")
VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0-emulated"}
KEEP_ALIVE_S = 600.0  # longer than the pauses of a test on a busy machine

_PATH = re.compile(
    r"/api(?:/v1|s/(?P<group>[^/]+)/v1)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>log))?)?"
)
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
_PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
_REVIEWS = {"selfsubjectaccessreviews", "selfsubjectreviews"}


class ApiServer:
    """Answers requests for a cluster."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster

    def __call__(self, exchange: Exchange) -> None:
        _Request(self.cluster, exchange).serve()


class _Request:
    """One request, and its response."""

    def __init__(self, cluster: KubernetesCluster, exchange: Exchange) -> None:
        self.cluster = cluster
        self.exchange = exchange
        self.command = exchange.command
        self.headers = exchange.headers

    def serve(self) -> None:
        """Answer the request, or interrupt it."""
        body, address = self.exchange.body, self.exchange.address
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        outcome = self.cluster.interruptions.before()
        if outcome is Outcome.DROP:
            raise HangUp
        try:
            if outcome is Outcome.REFUSE:
                raise Refused(503, "ServiceUnavailable", "the server is currently unable to handle")
            given = json.loads(body) if body else {}
            if self.exchange.fault is not None:
                self._send(200, self._fault(self.exchange.fault, given))
                return
            if self.cluster.delay_s:
                time.sleep(self.cluster.delay_s)
            with self.cluster.lock:
                self.cluster.requests += 1
            result = self._result(address.path, query, given)
            if self.cluster.interruptions.after() is Outcome.DROP:
                raise HangUp
            if result is not None:
                self._send(201 if self.command == "POST" else 200, result)
        except Refused as refused:
            if self.cluster.interruptions.after() is Outcome.DROP:
                raise HangUp from refused
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

    def _result(self, path: str, query: dict[str, str], given: Json) -> Json | None:
        """The response, or None if it was sent as a stream."""
        path = path.rstrip("/")
        if path == "/version":
            return VERSION
        user = self._user()
        self.cluster.raise_injected()
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
            verb, permission = "get", f"{resource}/{match['sub']}"
        else:
            permission = resource
        self._permit(user, kind, permission, verb, namespace)
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
            problems = schema.problems(resource, given, is_patch=verb == "patch")
            if problems and query.get("fieldValidation") == "Strict":
                message = f"strict decoding error: {', '.join(problems)}"
                raise Refused(400, "BadRequest", message)
        if verb == "create":
            self.cluster.admit(resource, namespace, given)
            return objects.create(resource, namespace, given, dry_run="dryRun" in query)
        if verb == "patch":
            if self.headers.get("Content-Type", "") not in _PATCHES:
                message = f"the body of the request was in an unknown format - accepted: {_PATCHES}"
                raise Refused(415, "UnsupportedMediaType", message)
            return objects.patch(resource, namespace, name, given)
        with objects.changed:
            if verb == "list":
                return self._page(kind, namespace, query)
            stored = objects.get(resource, namespace, name)
            if verb == "get":
                return cast(Json, json.loads(json.dumps(stored)))
            uid = (given.get("preconditions") or {}).get("uid")
            if uid and uid != stored["metadata"]["uid"]:
                raise Refused(
                    409, "Conflict", f"the UID in the precondition ({uid}) does not match"
                )
            if resource == "pods":
                self.cluster.kubelet.delete(stored)
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
            self.cluster.requested_rights.add((kind.group, resource, verb))
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
        attributes = given["spec"]["resourceAttributes"]
        name = "/".join(filter(None, (attributes["resource"], attributes.get("subresource"))))
        allowed = self.cluster.may(user, attributes.get("group", ""), name, attributes["verb"])
        return given | {"status": {"allowed": allowed}}

    def _fault(self, name: str, given: Json) -> Json:
        if name not in FAULTS:
            raise Refused(404, "NotFound", f"expected a fault of {', '.join(FAULTS)}, found {name}")
        try:
            inject(self.cluster, FAULTS, name, given)
        except ValueError as error:
            raise Refused(400, "BadRequest", str(error)) from error
        return {}

    def _log(self, pod: Json, query: dict[str, str]) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]["name"]
        if query.get("container", container) != container:
            message = f"container {query['container']} is not valid for pod {meta['name']}"
            raise Refused(400, "BadRequest", message)
        waiting = state_of(pod).get("waiting")
        if waiting is not None or not state_of(pod):
            reason = (waiting or {}).get("reason", "ContainerCreating")
            message = (
                f'container "{container}" in pod "{meta["name"]}" is waiting to start: {reason}'
            )
            raise Refused(400, "BadRequest", message)
        since = unix_seconds(query["sinceTime"]) if "sinceTime" in query else 0.0
        follow, with_time = query.get("follow") == "true", query.get("timestamps") == "true"
        self.exchange.stream(
            "text/plain",
            (
                f"{f'{_nanoseconds(wall_s)} ' if with_time else ''}{text}\n".encode()
                for wall_s, text in self._lines(meta["uid"], follow=follow)
                if wall_s >= int(since)
            ),
        )

    def _lines(self, process: str, *, follow: bool) -> Iterator[tuple[float, str]]:
        processes, read = self.cluster.kubelet.processes, 0
        with contextlib.suppress(KeyError):  # the pod was removed in the meantime
            while True:
                # Read the counter before the lines, so that no new line is missed.
                seen = processes.get(process)
                for number, wall_s, text in processes.log_lines(process, read):
                    read = number
                    yield wall_s, text
                if not follow or seen.state == "ended":
                    return
                if self.exchange.closing.is_set():
                    raise ConnectionAbortedError
                processes.wait_change(process, 0.5, after=seen.changes)

    def _send(self, code: int, body: Json, *, after_s: int | str | None = None) -> None:
        headers = {} if after_s is None else {"Retry-After": str(after_s)}
        self.exchange.answer_json(code, body, headers)


def _nanoseconds(wall_s: float) -> str:
    whole = datetime.fromtimestamp(int(wall_s), UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{int(wall_s * 1e9) % 1_000_000_000:09}Z"


def _resources(group: str) -> Json:
    """The list of resources, which ``kubectl`` reads first."""
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
