"""Options of Kubernetes Jobs, and the node that a spec requests.

Values that Kubernetes has a syntax for use that syntax (``tolerations``, ``volumes``, quantities
such as ``16Gi``). ``docs/backends/kubernetes.md`` describes every option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executors import options as declared
from executors.base import LaunchRefused, ReplicaSpec
from executors.kubernetes.hardware import PRODUCTS
from executors.options import Json, Scope, option, poll_interval, refused, request_timeout

REGION_LABEL = "topology.kubernetes.io/region"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""https://kueue.sigs.k8s.io/docs/tasks/run/jobs/"""
KUEUE_PREFIX = "kueue.x-k8s.io/"

_OF_HARDWARE = ("gpus", "gpu_resource", "node_selector", "tolerations", "requests", "limits")
_OF_SPOT = ("node_selector", "tolerations")
_SET_ELSEWHERE = {
    "pod": ("containers", "restartPolicy", "volumes", "activeDeadlineSeconds"),
    "container": ("name", "image", "command", "args", "env", "resources", "volumeMounts"),
}
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_KEY_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_OWN_PREFIX = "archipelago-"
_RESERVED_PREFIXES = ("kubernetes.io", "k8s.io", "batch.kubernetes.io")
_RESERVED_NAMES = ("job-name", "controller-uid")
_ANNOTATION_BYTES = 256 * 1024
_COUNTED = re.compile(r"(.+?)(?::([1-9][0-9]?))?")


def check_label(what: str, value: str) -> str:
    """Return ``value``. Raises :class:`LaunchRefused` for an invalid label value.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
    """
    if not _LABEL.fullmatch(value):
        raise LaunchRefused(
            f"{what}: expected at most 63 letters, digits, '-', '_' or '.', with a letter or digit "
            f"at either end (a Kubernetes label), found {value!r}"
        )
    return value


def checked_metadata(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """The option ``labels`` or ``annotations``.

    Raises :class:`ValueError` or :class:`LaunchRefused` for a key or value that Kubernetes refuses,
    and for keys that Archipelago or Kubernetes itself sets.
    """
    for key, value in given.items():
        prefix, slash, rest = key.rpartition("/")
        if not _KEY_NAME.fullmatch(rest) or (
            slash and (len(prefix) > 253 or not _KEY_PREFIX.fullmatch(prefix))
        ):
            raise refused(
                name,
                "keys of the form name or example.com/name, with at most 63 letters, digits, '-', "
                "'_' or '.' in the name (Kubernetes' syntax)",
                key,
            )
        if key.startswith(_OWN_PREFIX) or prefix in _RESERVED_PREFIXES or key in _RESERVED_NAMES:
            raise refused(name, "no key that Archipelago or Kubernetes itself sets", key)
        if name == "labels":
            check_label(f"labels {key}", value)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in given.items())
    if size > _ANNOTATION_BYTES:
        raise refused(name, f"at most {_ANNOTATION_BYTES} bytes", size)
    queue = given.get(QUEUE_LABEL)
    if name == "labels" and queue is not None and not _KEY_PREFIX.fullmatch(queue):
        raise refused(f"labels {QUEUE_LABEL}", "the name of a LocalQueue", queue)
    return dict(given)


def _spot(name: str, value: Json) -> Json:
    return _parts(name, value, _OF_SPOT)


def _hardware_entries(name: str, value: Json) -> Json:
    return {str(key): _parts(f"{name}.{key}", each, _OF_HARDWARE) for key, each in value.items()}


def _fields(name: str, value: Json) -> Json:
    if fixed := sorted(set(value) & set(_SET_ELSEWHERE[name])):
        raise ValueError(f"{name}: expected no {', '.join(fixed)}, which other options set")
    return value


def _parts(name: str, value: Any, known: tuple[str, ...]) -> Json:
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        raise refused(name, f"a mapping of {', '.join(known)}", value)
    checked: Json = {}
    for part, each in value.items():
        if part == "gpus":
            if isinstance(each, bool) or not isinstance(each, int) or each < 0:
                raise refused(f"{name}.gpus", "a number of GPUs", each)
            checked[part] = each
        elif part == "tolerations":
            checked[part] = declared.list_of_objects(f"{name}.{part}", each)
        elif part == "gpu_resource":
            checked[part] = str(each)
        else:
            checked[part] = declared.map_of_text(f"{name}.{part}", each)
    return checked


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one job. Empty values leave the choice to the cluster.

    Options that act with the rights of the credential (identity, secrets, nodes, volumes, security
    context) are restricted.
    """

    namespace: str = option(
        label="Namespace",
        scope=Scope.EXECUTOR,
        in_credential=True,
        help="Leave empty for the namespace of the context, or of the server's pod.",
    )
    context: str = option(
        label="Context",
        scope=Scope.EXECUTOR,
        in_credential=True,
        help="Leave empty for the current context of the kubeconfig.",
    )
    autoscaled: bool = option(
        False,
        label="Autoscaled",
        scope=Scope.EXECUTOR,
        help="Nodes are created on demand, so the preflight does not require them",
    )
    poll_s: float = poll_interval(2.0, exclusive=False)
    answer_s: float = request_timeout()
    image: str = option(label="Image", in_credential=True, help="A pool's own image replaces it.")
    python: str = option(
        "python", label="Python", scope=Scope.POOL, help="The interpreter in the image"
    )
    node_selector: Mapping[str, str] = option({}, label="Node selector")
    tolerations: tuple[Json, ...] = option((), label="Tolerations")
    spot: Json = option(  # noqa: RUF009
        {},
        label="Spot nodes",
        check=_spot,
        help="node_selector and tolerations of this cluster's spot nodes",
    )
    hardware: Mapping[str, Json] = option(
        {}, label="Hardware", check=_hardware_entries, help="Further names of hardware"
    )
    gpu_resource: str = option("nvidia.com/gpu", label="GPU resource", scope=Scope.POOL)
    requests: Mapping[str, str] = option({}, label="Requests", scope=Scope.POOL)
    limits: Mapping[str, str] = option({}, label="Limits", scope=Scope.POOL)
    shared_memory: str = option(
        label="Shared memory",
        scope=Scope.POOL,
        help="Size of /dev/shm, e.g. 16Gi. It counts as memory of the pod.",
    )
    volumes: tuple[Json, ...] = option((), label="Volumes")
    volume_mounts: tuple[Json, ...] = option((), label="Volume mounts")
    image_pull_secrets: tuple[str, ...] = option((), label="Image pull secrets")
    service_account: str = option(label="Service account")
    priority_class: str = option(label="Priority class")
    labels: Mapping[str, str] = option(
        {}, label="Labels", check=checked_metadata, help="Labels of the Job and its pod"
    )
    annotations: Mapping[str, str] = option(
        {}, label="Annotations", check=checked_metadata, help="Annotations of the Job and its pod"
    )
    grace_s: int = option(
        30,
        label="Grace period",
        unit="s",
        minimum=0,
        scope=Scope.POOL,
        help="Time between SIGTERM and SIGKILL",
    )
    keep_s: int = option(
        86_400,
        label="Retention",
        unit="s",
        minimum=0,
        scope=Scope.POOL,
        help="Time that an ended Job remains, with its pod, log and Secret",
    )
    pod: Json = option({}, label="Pod fields", check=_fields)  # noqa: RUF009
    container: Json = option({}, label="Container fields", check=_fields)  # noqa: RUF009

    @property
    def queue(self) -> str:
        """The Kueue LocalQueue that admits the Job; empty without one."""
        return self.labels.get(QUEUE_LABEL, "")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The node that a job requests. ``products``: allowed values of the node's product label;
    empty for any."""

    gpus: int = 0
    gpu_resource: str = ""
    products: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Json, ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)


def machine(options: Options, spec: ReplicaSpec) -> Machine:
    """The node for ``spec``: its hardware, region and spot. Raises :class:`LaunchRefused`."""
    found = _hardware(options, spec.hardware)
    selector = {**options.node_selector, **found.node_selector}
    tolerations = [*options.tolerations, *found.tolerations]
    if found.gpus:
        tolerations.append(
            {"key": found.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        )
    if spec.region:
        selector[REGION_LABEL] = spec.region
    if spec.spot:
        if not options.spot:
            raise LaunchRefused(
                "spot: expected the option spot with the labels and taints of spot nodes, "
                "found none"
            )
        selector |= options.spot.get("node_selector", {})
        tolerations += options.spot.get("tolerations", ())
    return Machine(
        gpus=found.gpus,
        gpu_resource=found.gpu_resource,
        products=found.products,
        node_selector=selector,
        tolerations=tuple(tolerations),
        requests={**options.requests, **found.requests},
        limits={**options.limits, **found.limits},
    )


def _hardware(options: Options, name: str) -> Machine:
    own = options.hardware.get(name)
    if own is not None:
        return Machine(**{"gpu_resource": options.gpu_resource, **own})
    if name == "cpu":
        return Machine()
    match = _COUNTED.fullmatch(name)
    kind, count = (match[1], int(match[2] or 1)) if match else ("", 0)
    if kind == "gpu":
        return Machine(gpus=count, gpu_resource=options.gpu_resource)
    if kind in PRODUCTS:
        return Machine(gpus=count, gpu_resource=options.gpu_resource, products=PRODUCTS[kind])
    known = ("cpu", "gpu", *PRODUCTS, *options.hardware)
    raise LaunchRefused(
        f"hardware: expected {', '.join(dict.fromkeys(known))} (with :N for N GPUs), found {name!r}"
    )
