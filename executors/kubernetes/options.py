"""What :class:`executors.kubernetes.executor.KubernetesExecutor` can be told, and the node it asks
for.

``docs/backends/kubernetes.md`` describes every option; here is what each must look like. Options of
a spec replace those of the same name of the executor. Values that Kubernetes has words for are in
those words (``tolerations``, ``volumes``, quantities like ``16Gi``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from executors.base import LaunchRefused, ReplicaSpec
from executors.kubernetes.hardware import PRODUCTS

REGION_LABEL = "topology.kubernetes.io/region"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""https://kueue.sigs.k8s.io/docs/tasks/run/jobs/"""
KUEUE_PREFIX = "kueue.x-k8s.io/"

OF_EXECUTOR = ("namespace", "context", "autoscaled", "poll_s", "answer_s")
"""Options of the executor as a whole, which a spec cannot change."""

POOL_OPTIONS = frozenset(
    {"python", "gpu_resource", "requests", "limits", "shared_memory", "grace_s", "keep_s"}
)
"""Options a pool can set by itself. All others reach into the cluster (identity, secrets, nodes,
volumes, security context) and need a pattern of the credential."""

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one job, checked. Empty means: leave it to the cluster."""

    image: str = ""
    python: str = "python"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Json, ...] = ()
    spot: Json = field(default_factory=dict)
    hardware: Mapping[str, Json] = field(default_factory=dict)
    gpu_resource: str = "nvidia.com/gpu"
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    shared_memory: str = ""
    volumes: tuple[Json, ...] = ()
    volume_mounts: tuple[Json, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str = ""
    priority_class: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    grace_s: int = 30
    keep_s: int = 86_400
    pod: Json = field(default_factory=dict)
    container: Json = field(default_factory=dict)

    @property
    def queue(self) -> str:
        """The Kueue LocalQueue that admits the Job; empty without one."""
        return self.labels.get(QUEUE_LABEL, "")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The node a job asks for. ``products``: values of its product label, of which one must be
    the node's; empty for any."""

    gpus: int = 0
    gpu_resource: str = ""
    products: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Json, ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)


OPTIONS = tuple(option.name for option in fields(Options))

_MAPS_OF_TEXT = ("node_selector", "requests", "limits")
_LISTS_OF_MAPS = ("tolerations", "volumes", "volume_mounts")
_OF_HARDWARE = ("gpus", "gpu_resource", "node_selector", "tolerations", "requests", "limits")
_OF_SPOT = ("node_selector", "tolerations")
_NOT_IN_POD = ("containers", "restartPolicy", "volumes", "activeDeadlineSeconds")
_NOT_IN_CONTAINER = ("name", "image", "command", "args", "env", "resources", "volumeMounts")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_KEY_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_OWN_PREFIX = "archipelago-"
_RESERVED_PREFIXES = ("kubernetes.io", "k8s.io", "batch.kubernetes.io")
_RESERVED_NAMES = ("job-name", "controller-uid")
_ANNOTATION_BYTES = 256 * 1024
_COUNTED = re.compile(r"(.+?)(?::([1-9][0-9]?))?")


def read(of_executor: Mapping[str, Any], of_spec: Mapping[str, Any]) -> Options:
    """The options of one job. Raises :class:`LaunchRefused` for what they cannot be."""
    fixed = sorted(set(of_spec) & set(OF_EXECUTOR))
    if fixed:
        raise LaunchRefused(f"{', '.join(fixed)}: expected in the executor's options, not a job's")
    given = {**of_executor, **of_spec}
    unknown = sorted(set(given) - set(OPTIONS) - set(OF_EXECUTOR))
    if unknown:
        raise LaunchRefused(
            f"options: expected {', '.join((*OF_EXECUTOR, *OPTIONS))}, found {', '.join(unknown)}"
        )
    return Options(**{name: _checked(name, given[name]) for name in OPTIONS if name in given})


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
                "spot: expected the option spot to say how this cluster marks such nodes, "
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


def _checked(name: str, value: Any) -> Any:
    if name in ("grace_s", "keep_s"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            _refuse(name, "a whole number of seconds", value)
        return value
    if name in ("labels", "annotations"):
        return checked_metadata(name, _map_of_text(name, value))
    if name in _MAPS_OF_TEXT:
        return _map_of_text(name, value)
    if name in _LISTS_OF_MAPS:
        return _list_of_maps(name, value)
    if name == "image_pull_secrets":
        if not _is_list(value) or not all(isinstance(each, str) for each in value):
            _refuse(name, "a list of names", value)
        return tuple(value)
    if name == "spot":
        return _parts(name, value, _OF_SPOT)
    if name == "hardware":
        if not isinstance(value, Mapping):
            _refuse(name, "a mapping of names to what each asks for", value)
        return {
            str(key): _parts(f"{name}.{key}", each, _OF_HARDWARE) for key, each in value.items()
        }
    if name in ("pod", "container"):
        if not isinstance(value, Mapping):
            _refuse(name, "a mapping of Kubernetes fields", value)
        ours = sorted(set(value) & set(_NOT_IN_POD if name == "pod" else _NOT_IN_CONTAINER))
        if ours:
            raise LaunchRefused(f"{name}: expected no {', '.join(ours)}, which other options set")
        return dict(value)
    if not isinstance(value, str):
        _refuse(name, "a text", value)
    return value


def check_label(what: str, value: str) -> str:
    """The value itself. Raises :class:`LaunchRefused` where it is no valid label value.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
    """
    if not _LABEL.fullmatch(value):
        raise LaunchRefused(
            f"{what}: expected at most 63 letters, digits, '-', '_' or '.', with a letter or digit "
            f"at either end (a Kubernetes label), found {value!r}"
        )
    return value


def checked_metadata(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """The option ``labels`` or ``annotations``, checked. Raises :class:`LaunchRefused` for a key
    or value that Kubernetes refuses, and for keys that Archipelago or Kubernetes itself sets."""
    for key, value in given.items():
        prefix, slash, rest = key.rpartition("/")
        if not _KEY_NAME.fullmatch(rest) or (
            slash and (len(prefix) > 253 or not _KEY_PREFIX.fullmatch(prefix))
        ):
            _refuse(
                name,
                "keys of the form name or example.com/name, with at most 63 letters, digits, '-', "
                "'_' or '.' in the name (Kubernetes' syntax)",
                key,
            )
        if key.startswith(_OWN_PREFIX) or prefix in _RESERVED_PREFIXES or key in _RESERVED_NAMES:
            _refuse(name, "no key that Archipelago or Kubernetes itself sets", key)
        if name == "labels":
            check_label(f"labels {key}", value)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in given.items())
    if size > _ANNOTATION_BYTES:
        _refuse(name, f"at most {_ANNOTATION_BYTES} bytes", size)
    queue = given.get(QUEUE_LABEL)
    if name == "labels" and queue is not None and not _KEY_PREFIX.fullmatch(queue):
        _refuse(f"labels {QUEUE_LABEL}", "the name of a LocalQueue", queue)
    return dict(given)


def _parts(name: str, value: Any, known: tuple[str, ...]) -> Json:
    if not isinstance(value, Mapping) or not set(value) <= set(known):
        _refuse(name, f"a mapping of {', '.join(known)}", value)
    checked: Json = {}
    for part, each in value.items():
        if part == "gpus":
            if isinstance(each, bool) or not isinstance(each, int) or each < 0:
                _refuse(f"{name}.gpus", "a number of GPUs", each)
            checked[part] = each
        elif part == "tolerations":
            checked[part] = _list_of_maps(f"{name}.{part}", each)
        elif part == "gpu_resource":
            checked[part] = str(each)
        else:
            checked[part] = _map_of_text(f"{name}.{part}", each)
    return checked


def _map_of_text(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(each, str | int | float) and not isinstance(each, bool)
        for each in value.values()
    ):
        _refuse(name, "a mapping of names to texts or numbers", value)
    return {str(key): str(each) for key, each in value.items()}


def _list_of_maps(name: str, value: Any) -> tuple[Json, ...]:
    if not _is_list(value) or not all(isinstance(each, Mapping) for each in value):
        _refuse(name, "a list of mappings", value)
    return tuple(dict(each) for each in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _refuse(name: str, expected: str, found: Any) -> None:
    raise LaunchRefused(f"{name}: expected {expected}, found {found!r}")
