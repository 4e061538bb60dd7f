"""The Kubernetes API calls of the executor, through the official client.

Results are the API's JSON, which :mod:`executors.kubernetes.status` interprets. Every error becomes
one of :mod:`executors.base`. :data:`RIGHTS` lists all permissions that a Role needs; tests compare
it with the Role of ``docs/backends/kubernetes.md`` and with the actual calls.

https://kubernetes.io/docs/reference/kubernetes-api/
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from executors.base import AccountError, ExecutorError, LaunchRefused, NoCapacity, RetryLater
from executors.launching import retry_after_s
from executors.options import Json

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration
    from urllib3 import BaseHTTPResponse

RIGHTS: tuple[tuple[str, str, str], ...] = (
    ("batch", "jobs", "create"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "list"),
    ("batch", "jobs", "patch"),
    ("batch", "jobs", "delete"),
    ("", "secrets", "create"),
    ("", "secrets", "delete"),
    ("", "pods", "list"),
    ("", "pods/log", "get"),
)
"""API group, resource and verb, in the executor's namespace."""

USEFUL_RIGHTS: tuple[tuple[str, str, str], ...] = (
    ("", "events", "list"),
    ("", "resourcequotas", "list"),
)
"""Optional permissions: they explain why a job waits or does not fit."""

CONNECT_S = 5.0
QUIET_S = 60.0
"""Read timeout of a followed log, after which its connection is opened again."""

PAGE = 500
CONNECTIONS = 16


T = TypeVar("T")


class AlreadyThere(LaunchRefused):
    """An object of that name exists already."""


class Gone(LaunchRefused):
    """The object does not exist."""


class Cluster:
    """One namespace of one cluster. ``answer_s`` is the timeout of a request. Thread-safe."""

    def __init__(
        self, configuration: Configuration, namespace: str, *, answer_s: float = 30.0
    ) -> None:
        import urllib3
        from kubernetes.client import ApiClient, BatchV1Api, CoreV1Api

        # The client's own retries would sleep for the whole Retry-After of the server.
        configuration.retries = urllib3.Retry(
            total=1, read=0, redirect=0, status=0, other=0, respect_retry_after_header=False
        )
        configuration.connection_pool_maxsize = CONNECTIONS
        self.host = configuration.host
        self.namespace = namespace
        self._limit_s = (min(CONNECT_S, answer_s), answer_s)
        self._client: ApiClient = ApiClient(configuration)
        self._client.user_agent = "archipelago"
        self._batch = BatchV1Api(self._client)
        self._core = CoreV1Api(self._client)

    def create_job(self, job: Json, *, dry_run: bool = False) -> Json:
        """Raises :class:`AlreadyThere`."""
        options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        with self._namespace_exists():
            return self._json(
                self._batch.create_namespaced_job,
                self.namespace,
                job,
                # Refuse unknown fields instead of dropping them.
                field_validation="Strict",
                **options,
            )

    def read_job(self, name: str) -> Json | None:
        with contextlib.suppress(Gone):
            return self._get(self._batch.read_namespaced_job, name, self.namespace)
        return None

    def list_jobs(self, selector: str) -> list[Json]:
        return self._all(self._batch.list_namespaced_job, self.namespace, label_selector=selector)

    def patch_job(self, name: str, patch: Json) -> Json:
        """The Job after the patch. Raises :class:`Gone`."""
        return self._json(
            self._batch.patch_namespaced_job,
            name,
            self.namespace,
            patch,
            field_validation="Strict",
            _content_type="application/merge-patch+json",
        )

    def delete_job(self, name: str, uid: str) -> None:
        """Delete the Job with that uid, its pods and its Secret."""
        with contextlib.suppress(Gone, AlreadyThere):  # a conflict: another Job of the same name
            self._json(
                self._batch.delete_namespaced_job,
                name,
                self.namespace,
                body={"propagationPolicy": "Background", "preconditions": {"uid": uid}},
            )

    def create_secret(self, secret: Json) -> None:
        """Raises :class:`AlreadyThere`."""
        with self._namespace_exists():
            self._json(
                self._core.create_namespaced_secret,
                self.namespace,
                secret,
                field_validation="Strict",
            )

    def delete_secret(self, name: str) -> None:
        """Delete a Secret if it exists."""
        with contextlib.suppress(Gone):
            self._json(self._core.delete_namespaced_secret, name, self.namespace)

    @contextlib.contextmanager
    def _namespace_exists(self) -> Iterator[None]:
        """Convert a 404 of a create request, which means a missing namespace.

        https://kubernetes.io/docs/concepts/overview/working-with-objects/namespaces/
        """
        try:
            yield
        except Gone as error:
            raise AccountError(
                f"namespace {self.namespace} of {self.host} does not exist: create it, or change "
                f"the option namespace ({error})"
            ) from error

    def list_pods(self, selector: str) -> list[Json]:
        return self._all(self._core.list_namespaced_pod, self.namespace, label_selector=selector)

    def warnings(self) -> dict[str, str]:
        """The newest warning about each object of the namespace, by its name."""
        listed = self._get(
            self._core.list_namespaced_event,
            self.namespace,
            field_selector="type=Warning",
            limit=PAGE,
        )
        events = sorted(listed.get("items") or (), key=_when)
        return {
            event["involvedObject"].get(
                "name", ""
            ): f"{event.get('reason')}: {event.get('message')}"
            for event in events
        }

    def list_quotas(self) -> list[Json]:
        return self._all(self._core.list_namespaced_resource_quota, self.namespace)

    def list_nodes(self) -> list[Json]:
        return self._all(self._core.list_node)

    def whoami(self) -> str:
        """The user name of the credential; empty before Kubernetes 1.28."""
        from kubernetes.client import AuthenticationV1Api

        api = AuthenticationV1Api(self._client)
        with contextlib.suppress(Gone):
            review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
            found = self._json(api.create_self_subject_review, review)
            return str(found["status"]["userInfo"].get("username", ""))
        return ""

    def version(self) -> str:
        from kubernetes.client import VersionApi

        return str(self._json(VersionApi(self._client).get_code).get("gitVersion", ""))

    def is_allowed(self, group: str, resource: str, verb: str) -> bool:
        from kubernetes.client import AuthorizationV1Api

        resource, _, subresource = resource.partition("/")
        attributes = {"namespace": self.namespace, "group": group, "resource": resource}
        attributes |= {"verb": verb} | ({"subresource": subresource} if subresource else {})
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        found = self._json(
            AuthorizationV1Api(self._client).create_self_subject_access_review,
            {**review, "spec": {"resourceAttributes": attributes}},
        )
        return bool(found.get("status", {}).get("allowed"))

    @contextlib.contextmanager
    def log(
        self, pod: str, container: str, *, since: str = "", follow: bool = False
    ) -> Iterator[Iterator[bytes]]:
        """A stream of the container's log, with a timestamp before each line.

        Raises :class:`Gone` if the pod does not exist or its container has not started.
        """
        query = [("container", container), ("timestamps", "true")]
        query += [("follow", "true")] if follow else []
        query += [("sinceTime", since)] if since else []
        # The client's read_namespaced_pod_log lacks sinceTime.
        request = self._client.param_serialize(
            "GET",
            "/api/v1/namespaces/{namespace}/pods/{name}/log",
            path_params={"namespace": self.namespace, "name": pod},
            query_params=query,
            header_params={"Accept": "*/*"},
            auth_settings=["BearerToken"],
        )
        with errors():
            limit_s = (self._limit_s[0], QUIET_S)
            answer = _repeated(lambda: self._client.call_api(*request, _request_timeout=limit_s))
            if not 200 <= answer.status <= 299:
                answer.read()  # type: ignore[no-untyped-call]
                _refuse(answer.status, answer.data, answer.headers)
        response: BaseHTTPResponse = answer.response
        try:
            yield response.stream(decode_content=False)
        finally:
            response.close()
            response.release_conn()

    def _get(self, call: Any, *args: Any, **options: Any) -> Json:
        """Like :meth:`_json`, for read requests: retried once if the connection was closed. A
        server can close an idle connection while the request is sent."""
        return _repeated(lambda: self._json(call, *args, **options))

    def _json(self, call: Any, *args: Any, **options: Any) -> Json:
        with errors():
            response: BaseHTTPResponse = call(
                *args, **options, _preload_content=False, _request_timeout=self._limit_s
            )
            body = json.loads(response.data)
            response.release_conn()
        assert isinstance(body, dict)
        return body

    def _all(self, call: Any, *args: Any, **options: Any) -> list[Json]:
        """All items of a list, page by page."""
        items: list[Json] = []
        after: dict[str, str] = {}
        while True:
            page = self._get(call, *args, **options, **after, limit=PAGE)
            items += page.get("items") or []
            if not (more := page["metadata"].get("continue")):
                return items
            after = {"_continue": more}


def _repeated(request: Callable[[], T]) -> T:
    """The result of ``request``, which is repeated once if its connection was closed."""
    import urllib3

    try:
        return request()
    except (RetryLater, urllib3.exceptions.HTTPError) as error:
        cause = error if isinstance(error, urllib3.exceptions.HTTPError) else error.__cause__
        if not isinstance(getattr(cause, "reason", cause), urllib3.exceptions.ProtocolError):
            raise
    return request()


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Convert errors of the client to errors of :mod:`executors.base`."""
    import urllib3
    from kubernetes.client import ApiException
    from pydantic import ValidationError

    try:
        yield
    except ApiException as error:
        _refuse(error.status or 0, error.body or error.reason, error.headers)
    except ValidationError as error:  # refused by the client; do not show the value
        wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise LaunchRefused("; ".join(wrong)) from None
    except urllib3.exceptions.HTTPError as error:
        reason = getattr(error, "reason", None)
        if isinstance(reason, urllib3.exceptions.SSLError) and isinstance(
            reason.args[0] if reason.args else None, ssl.SSLCertVerificationError
        ):
            raise AccountError(f"the cluster's certificate is not trusted: {reason}") from error
        raise RetryLater(f"no response from the cluster: {error}") from error
    except json.JSONDecodeError as error:
        raise RetryLater(f"expected JSON from the cluster, found: {error}") from error


def _refuse(status: int, body: Any, headers: Any) -> NoReturn:
    message, reason = _status_fields(status, body)
    if status == 404:
        raise Gone(message)
    if status == 400 and "waiting to start" in message:
        raise Gone(message)
    if status == 409 and reason == "AlreadyExists":
        raise AlreadyThere(message)
    if status == 403 and "exceeded quota" in message:
        raise quota_error(message)
    if status in (401, 403) or status == 0:  # 0: TLS failed
        raise AccountError(message)
    if status in (408, 409, 410, 429) or status >= 500:
        raise RetryLater(message, after_s=_after_s(headers))
    raise LaunchRefused(message)


def _status_fields(status: int, body: Any) -> tuple[str, str]:
    """The message and the machine-readable reason of a ``Status`` object."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        found = json.loads(text)
        return str(found["message"]), str(found.get("reason", ""))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {text.strip()[:500] or 'no message'}", ""


def quota_error(message: str) -> ExecutorError:
    """Classify the refusal of a ResourceQuota: :class:`AccountError` if the limit is below the
    request even when nothing else runs, else :class:`NoCapacity`.

    The message is ``exceeded quota: NAME, requested: pods=1, used: pods=4, limited: pods=4``.
    https://kubernetes.io/docs/concepts/policy/resource-quotas/
    """
    match = _QUOTA.search(message)
    if match is not None:
        requested, limited = _amounts(match["requested"]), _amounts(match["limited"])
        if any(need > limited[name] for name, need in requested.items() if name in limited):
            return AccountError(f"{message}: the limit is below what one replica requests")
    return NoCapacity(message)


_QUOTA = re.compile(r"requested: (?P<requested>.*?), used: .*?, limited: (?P<limited>[^\s]+)")


def _amounts(text: str) -> dict[str, Decimal]:
    from kubernetes.utils.quantity import parse_quantity

    amounts = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        with contextlib.suppress(ValueError):
            amounts[name] = Decimal(parse_quantity(amount))  # type: ignore[no-untyped-call]
    return amounts


def _after_s(headers: Any) -> float | None:
    return retry_after_s(headers.get("Retry-After") if headers is not None else None)


def _when(event: Json) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
