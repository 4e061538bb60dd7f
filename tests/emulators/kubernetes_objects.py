"""The objects of an emulated cluster: stored, validated, selected, and deleted with their owner.

Responses and messages are those of the API server, for the requests of executors and ``kubectl``.
The rules and their sources:

- names are DNS subdomains of at most 253 characters, those of Jobs at most 63
  (https://kubernetes.io/docs/concepts/overview/working-with-objects/names/);
- keys and values of labels, keys of annotations, and 256 KiB of annotations
  (https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set,
  .../annotations/#syntax-and-character-set);
- an object is created in a namespace that exists, and not in one that is being deleted
  (https://kubernetes.io/docs/concepts/overview/working-with-objects/namespaces/);
- a patch that carries another ``resourceVersion`` than the object's is a conflict
  (https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions);
- ``spec.template`` and ``spec.completions`` of a Job are immutable, but for scheduling directives
  while it is suspended and has never started
  (https://kubernetes.io/docs/concepts/workloads/controllers/job/#mutable-scheduling-directives);
- a Secret holds at most 1 MiB
  (https://kubernetes.io/docs/concepts/configuration/secret/#restriction-data-size);
- the data of an ``immutable`` Secret cannot change
  (https://kubernetes.io/docs/concepts/configuration/secret/#secret-immutable);
- dependents are deleted after their owner (background), before it (foreground), or remain (orphan);
  a dependent without an owner is deleted
  (https://kubernetes.io/docs/concepts/architecture/garbage-collection/#cascading-deletion);
- fields and types are those of the schema (:mod:`tests.emulators.kubernetes_schema`).

Not emulated: watches, server-side apply, and validation of fields that no executor sends.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A resource of the API: ``jobs`` of group ``batch`` are of kind ``Job``."""

    resource: str
    kind: str
    group: str = ""
    namespaced: bool = True
    short: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def qualified(self) -> str:
        """The qualified name: ``jobs.batch``."""
        return f"{self.resource}.{self.group}" if self.group else self.resource


KINDS = {
    kind.resource: kind
    for kind in (
        Kind(resource="jobs", kind="Job", group="batch"),
        Kind(resource="pods", kind="Pod", short=("po",)),
        Kind(resource="secrets", kind="Secret"),
        Kind(resource="events", kind="Event", short=("ev",)),
        Kind(resource="resourcequotas", kind="ResourceQuota", short=("quota",)),
        Kind(resource="nodes", kind="Node", namespaced=False, short=("no",)),
    )
}

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_NAME_MUST_BE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character"
)
_MUTABLE = ("activeDeadlineSeconds", "suspend", "ttlSecondsAfterFinished", "parallelism")
_SCHEDULING = ("nodeSelector", "tolerations", "schedulingGates", "affinity")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ANNOTATION_BYTES = 256 * 1024
_SECRET_BYTES = 1024 * 1024


class Refused(Exception):
    """An error response: a ``Status`` object of this code and reason."""

    def __init__(
        self, code: int, reason: str, message: str, *, after_s: int | str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.after_s = after_s


class Objects:
    """All objects, guarded by one lock, the condition :attr:`changed`."""

    def __init__(self, namespaces: tuple[str, ...]) -> None:
        self.namespaces = set(namespaces)
        self.terminating: set[str] = set()
        """Namespaces that are being deleted."""
        self.changed = threading.Condition(threading.RLock())
        self.update_checks: list[Callable[[Json, Json], None]] = []
        """Webhooks for updates of Jobs, called with the old and the new object."""
        self._made: dict[tuple[str, str, str], Json] = {}
        self._version = 0

    def create(self, resource: str, namespace: str, given: Json, *, dry_run: bool = False) -> Json:
        kind = KINDS[resource]
        made = copy.deepcopy(given)
        name = made.setdefault("metadata", {}).get("name", "")
        if kind.namespaced and namespace not in self.namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if namespace in self.terminating:
            message = f"unable to create new content in namespace {namespace} because it is being "
            raise Refused(
                403, "Forbidden", f'{kind.qualified} "{name}" is forbidden: {message}terminated'
            )
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
            _invalid(kind, name, f'metadata.name: Invalid value: "{name}": {_NAME_MUST_BE}')
        _check_metadata(kind, name, made["metadata"], "metadata")
        if resource == "jobs":
            _check_job(made)
        if resource == "secrets":
            _check_secret(kind, name, made)
        made |= {"apiVersion": kind.api_version, "kind": kind.kind}
        made["metadata"] |= {
            "namespace": namespace if kind.namespaced else "",
            "uid": str(uuid.uuid4()),
            "creationTimestamp": timestamp(time.time()),
        }
        with self.changed:
            if (resource, namespace, name) in self._made:
                raise Refused(409, "AlreadyExists", f'{kind.qualified} "{name}" already exists')
            if not dry_run:
                self._made[resource, namespace, name] = made
                self._touch(made)
            return copy.deepcopy(made)

    def get(self, resource: str, namespace: str, name: str) -> Json:
        """The stored object, not a copy; hold the lock to use it. Raises :class:`Refused`."""
        stored = self._made.get((resource, namespace, name))
        if stored is None:
            qualified = KINDS[resource].qualified
            raise Refused(404, "NotFound", f'{qualified} "{name}" not found')
        return stored

    def all(
        self, resource: str, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> list[Json]:
        """Objects of one kind that the selectors match, the oldest first."""
        matches = _label_matcher(labels)
        with self.changed:
            return [
                made
                for (kind, where, _), made in self._made.items()
                if kind == resource
                and (not namespace or where == namespace)
                and matches(made["metadata"].get("labels") or {})
                and _has_fields(made, fields)
            ]

    def patch(self, resource: str, namespace: str, name: str, given: Json) -> Json:
        with self.changed:
            made = self.get(resource, namespace, name)
            kind = KINDS[resource]
            version = (given.get("metadata") or {}).get("resourceVersion")
            if version is not None and version != made["metadata"]["resourceVersion"]:
                raise Refused(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {kind.qualified} "{name}": the object has '
                    "been modified; please apply your changes to the latest version and try again",
                )
            wanted = copy.deepcopy(made)
            _merge(wanted, given)
            _check_metadata(kind, name, wanted["metadata"], "metadata")
            for field in ("name", "namespace", "uid", "creationTimestamp"):
                if wanted["metadata"].get(field) != made["metadata"].get(field):
                    _invalid(kind, name, f"metadata.{field}: field is immutable")
            if resource == "jobs":
                _check_job_update(made, wanted)
                for check in self.update_checks:
                    check(made, wanted)
            if (
                resource == "secrets"
                and made.get("immutable")
                and (wanted.get("data") != made.get("data") or not wanted.get("immutable"))
            ):
                _invalid(kind, name, "data: Forbidden: field is immutable when `immutable` is set")
            made.clear()
            made.update(wanted)
            self._touch(made)
            return copy.deepcopy(made)

    def change(self, made: Json) -> None:
        """Record that an object was changed in place."""
        with self.changed:
            self._touch(made)

    def remove(self, resource: str, namespace: str, name: str) -> None:
        with self.changed:
            self._made.pop((resource, namespace, name), None)
            self._version += 1
            self.changed.notify_all()

    def delete(self, resource: str, namespace: str, name: str, policy: str) -> None:
        """Delete an object with ``propagationPolicy`` Background, Foreground or Orphan."""
        with self.changed:
            made = self.get(resource, namespace, name)
            if policy not in ("Background", "Foreground", "Orphan"):
                _invalid(KINDS[resource], name, f'propagationPolicy: Unsupported value: "{policy}"')
            if policy == "Background":
                self.remove(resource, namespace, name)
                return
            dependents = [
                each
                for (_, where, _), each in self._made.items()
                if where == namespace and _is_owned_by(each, made)
            ]
            if policy == "Orphan":
                for each in dependents:
                    each["metadata"]["ownerReferences"] = [
                        owner
                        for owner in each["metadata"]["ownerReferences"]
                        if owner["uid"] != made["metadata"]["uid"]
                    ]
                    self._touch(each)
                self.remove(resource, namespace, name)
                return
            made["metadata"] |= {
                "deletionTimestamp": timestamp(time.time()),
                "finalizers": ["foregroundDeletion"],
            }
            self._touch(made)

    def in_foreground_deletion(self) -> Iterator[tuple[str, Json, list[tuple[str, Json]]]]:
        """Objects that wait for the deletion of their dependents, with these."""
        with self.changed:
            for (resource, _, _), made in list(self._made.items()):
                if "foregroundDeletion" in (made["metadata"].get("finalizers") or ()):
                    dependents = [
                        (kind, each)
                        for (kind, _, _), each in self._made.items()
                        if _is_owned_by(each, made)
                    ]
                    yield resource, made, dependents

    def orphans(self) -> Iterator[tuple[str, Json]]:
        """Objects whose owner no longer exists, with their resource."""
        with self.changed:
            alive = {made["metadata"]["uid"] for made in self._made.values()}
            for (resource, _, _), made in list(self._made.items()):
                owners = made["metadata"].get("ownerReferences") or ()
                if owners and not any(owner["uid"] in alive for owner in owners):
                    yield resource, made

    def owned(self, resource: str, owner: Json) -> list[Json]:
        """Objects of one kind that ``owner`` owns."""
        meta = owner["metadata"]
        return [made for made in self.all(resource, meta["namespace"]) if _is_owned_by(made, owner)]

    def warn(self, about: Json, reason: str, message: str) -> None:
        """One event for each object and reason, as ``kubectl get events`` shows them."""
        meta = about["metadata"]
        name = f"{meta['name']}.{reason.lower()}"
        now = timestamp(time.time())
        with contextlib.suppress(Refused):
            event = self.get("events", meta["namespace"], name)
            if event["message"] != message:
                event |= {"message": message, "lastTimestamp": now}
                self.change(event)
            return
        self.create(
            "events",
            meta["namespace"],
            {
                "metadata": {"name": name},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "involvedObject": {
                    key: about.get(key, meta.get(key, ""))
                    for key in ("kind", "namespace", "name", "uid")
                },
                "firstTimestamp": now,
                "lastTimestamp": now,
            },
        )

    @property
    def version(self) -> str:
        return str(self._version)

    def _touch(self, made: Json) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        self.changed.notify_all()


def timestamp(wall_s: float) -> str:
    """A time in an object's format, in whole seconds."""
    return f"{datetime.fromtimestamp(int(wall_s), UTC):%Y-%m-%dT%H:%M:%SZ}"


def unix_seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _check_job(job: Json) -> None:
    kind, name = KINDS["jobs"], job["metadata"]["name"]
    spec = job.get("spec") or {}
    template = spec.get("template") or {}
    pod = template.get("spec") or {}
    where = "spec.template.spec"
    if len(name) > 63:
        _invalid(
            kind, name, f'metadata.name: Invalid value: "{name}": must be no more than 63 bytes'
        )
    _check_metadata(kind, name, template.get("metadata") or {}, "spec.template")
    for count in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds"):
        if spec.get(count, 0) < 0:
            _invalid(kind, name, f"spec.{count}: must be greater than or equal to 0")
    policy = pod.get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        _invalid(kind, name, f'{where}.restartPolicy: Unsupported value: "{policy}"')
    if spec.get("podFailurePolicy") and policy != "Never":
        refused = f'Invalid value: "{policy}": only "Never" is supported with a pod failure policy'
        _invalid(kind, name, f"{where}.restartPolicy: {refused}")
    volumes = {volume.get("name") for volume in pod.get("volumes") or ()}
    if len(volumes) < len(pod.get("volumes") or ()):
        _invalid(kind, name, f"{where}.volumes: Duplicate value")
    for n, container in enumerate(pod.get("containers") or ()):
        at = f"{where}.containers[{n}]"
        if not container.get("image"):
            _invalid(kind, name, f"{at}.image: Required value")
        for variable in container.get("env") or ():
            if not _ENV.fullmatch(variable["name"]):
                _invalid(kind, name, f'{at}.env.name: Invalid value: "{variable["name"]}"')
        for mount in container.get("volumeMounts") or ():
            if mount["name"] not in volumes:
                _invalid(kind, name, f'{at}.volumeMounts.name: Not found: "{mount["name"]}"')
        for part in ("requests", "limits"):
            for key, quantity in ((container.get("resources") or {}).get(part) or {}).items():
                if not _QUANTITY.fullmatch(quantity) or ("/" in key and not quantity.isdigit()):
                    _invalid(
                        kind, name, f'{at}.resources.{part}[{key}]: Invalid value: "{quantity}"'
                    )
    if not pod.get("containers"):
        _invalid(kind, name, f"{where}.containers: Required value")


def _check_job_update(old: Json, new: Json) -> None:
    kind, name = KINDS["jobs"], old["metadata"]["name"]
    before, after = old["spec"], new["spec"]
    may_reschedule = before.get("suspend") and "startTime" not in (old.get("status") or {})
    for field in sorted(set(before) | set(after)):
        was, wanted = before.get(field), after.get(field)
        if was == wanted or field in _MUTABLE:
            continue
        if field == "template" and may_reschedule:
            was, wanted = _without_scheduling(was), _without_scheduling(wanted)
            if was == wanted:
                continue
        _invalid(kind, name, f"spec.{field}: Invalid value: field is immutable")
    _check_job(new)


def _without_scheduling(template: Any) -> Json:
    rest = copy.deepcopy(template or {})
    rest.pop("metadata", None)
    for field in _SCHEDULING:
        (rest.get("spec") or {}).pop(field, None)
    return dict(rest)


def _is_owned_by(made: Json, owner: Json) -> bool:
    uid = owner["metadata"]["uid"]
    return any(each["uid"] == uid for each in made["metadata"].get("ownerReferences") or ())


def _check_metadata(kind: Kind, name: str, metadata: Json, where: str) -> None:
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    for at, keys in (("labels", labels), ("annotations", annotations)):
        for key in keys:
            prefix, slash, rest = key.rpartition("/")
            good_prefix = not slash or (_SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253)
            if not good_prefix or not _KEY_NAME.fullmatch(rest):
                message = "name part must consist of alphanumeric characters, '-', '_' or '.'"
                _invalid(kind, name, f'{where}.{at}: Invalid value: "{key}": {message}')
    for value in labels.values():
        if not isinstance(value, str) or not _LABEL.fullmatch(value) or len(value) > 63:
            _invalid(
                kind,
                name,
                f'{where}.labels: Invalid value: "{value}": a valid label must be an '
                "empty string or consist of alphanumeric characters, '-', '_' or '.'",
            )
    size = sum(len(str(each).encode()) for item in annotations.items() for each in item)
    if size > _ANNOTATION_BYTES:
        _invalid(
            kind, name, f"{where}.annotations: Too long: may not be more than {_ANNOTATION_BYTES}"
        )
    for owner in metadata.get("ownerReferences") or ():
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                _invalid(kind, name, f"{where}.ownerReferences.{field}: must not be empty")


def _check_secret(kind: Kind, name: str, made: Json) -> None:
    size = sum(len(base64.b64decode(value)) for value in (made.get("data") or {}).values())
    size += sum(len(value.encode()) for value in (made.get("stringData") or {}).values())
    if size > _SECRET_BYTES:
        _invalid(kind, name, f"data: Too long: may not be more than {_SECRET_BYTES} bytes")


def _invalid(kind: Kind, name: str, message: str) -> NoReturn:
    of = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    raise Refused(422, "Invalid", f'{of} "{name}" is invalid: {message}')


def _label_matcher(selector: str) -> Callable[[Json], bool]:
    """https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/"""
    demands = [_demand(part.strip()) for part in re.findall(r"[^,(]+(?:\([^)]*\))?", selector)]
    return lambda labels: all(demand(labels) for demand in demands)


def _demand(part: str) -> Callable[[Json], bool]:
    """One requirement of a selector: ``a in (b, c)``, ``a=b``, ``a!=b``, ``a`` or ``!a``."""
    if several := re.fullmatch(r"(\S+) (in|notin) \(([^)]*)\)", part):
        key, operator, given = several.groups()
        values = {value.strip() for value in given.split(",")}
        return lambda labels: (labels.get(key) in values) is (operator == "in")
    if one := re.fullmatch(r"([^=!\s]+)\s*(!=|==?)\s*(\S*)", part):
        key, operator, value = one.groups()
        return lambda labels: (labels.get(key) == value) is (operator != "!=")
    return lambda labels: (part.lstrip("!") in labels) is not part.startswith("!")


def _has_fields(made: Json, selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        path, _, value = part.replace("==", "=").partition("=")
        result: Any = made
        for step in path.split("."):
            result = result.get(step, "") if isinstance(result, dict) else ""
        if str(result) != value:
            return False
    return True


def _merge(base: Json, over: Json) -> None:
    """JSON merge patch, RFC 7386."""
    for key, value in over.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict):
            _merge(base.setdefault(key, {}), value)
        else:
            base[key] = copy.deepcopy(value)
