"""Options of Modal Sandboxes, and the machine that a spec requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from executors import options as declared
from executors.base import LaunchRefused, Problem, ReplicaSpec
from executors.catalogue import Hardware
from executors.modal.hardware import TABLE
from executors.options import Scope, option, poll_interval, request_timeout

MAX_LIFETIME_S = 24 * 3600.0
"""Modal's limit (https://modal.com/docs/guide/sandboxes). Modal's default is five minutes."""

REGIONS = (
    *("us", "us-east", "us-central", "us-south", "us-west", "ca", "mx", "sa"),
    *("eu", "eu-west", "eu-north", "eu-south", "uk"),
    *("ap", "ap-northeast", "ap-southeast", "ap-south", "ap-melbourne", "jp", "au", "me", "af"),
)
"""Broad regions and their parts (https://modal.com/docs/guide/region-selection). Names of cloud
regions (``us-east-1``) start with one of these; Modal checks them."""

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,63}")
_NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-'"


def _name(name: str, value: str) -> str:
    if value and not _NAME.fullmatch(value):
        raise declared.refused(name, _NAME_RULE, value)
    return value


def _mount_paths(name: str, value: Mapping[str, str]) -> Mapping[str, str]:
    if not all(path.startswith("/") for path in value):
        raise declared.refused(name, "a mapping of absolute paths to the names of volumes", value)
    return value


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one job. Empty and None select our default, or Modal's."""

    app: str = option(
        label="App",
        scope=Scope.EXECUTOR,
        in_credential=True,
        check=_name,
        help="The App that holds the Sandboxes. Leave empty for the name of the deployment.",
    )
    environment: str = option(
        label="Environment",
        scope=Scope.EXECUTOR,
        in_credential=True,
        check=_name,
        help="Leave empty for the workspace's default.",
    )
    image: str = option(label="Image", help="Image of a registry. A pool's own image replaces it.")
    registry_secret: str = option(
        label="Registry secret", help="Modal secret with the credentials of the registry"
    )
    add_python: str = option(
        label="Python to add",
        scope=Scope.POOL,
        help="Version of Python, e.g. 3.12, for an image without one",
    )
    python_version: str = option(
        "3.12", label="Python", scope=Scope.POOL, help="Version in the default image"
    )
    requirements: tuple[str, ...] | None = option(
        None,
        label="Requirements",
        scope=Scope.POOL,
        help="pip requirements that Modal builds into the image. [] builds none.",
    )
    extra_index_url: str = option(
        label="Package index", scope=Scope.POOL, help="An additional package index"
    )
    gpu: str = option(
        label="GPU",
        help="Modal's name of a GPU, in place of the hardware's. "
        "The price remains that of the hardware.",
    )
    cpu: float | None = option(
        None,
        label="CPU",
        unit="physical cores",
        minimum=0,
        exclusive=True,
        scope=Scope.POOL,
        help="In place of the hardware's",
    )
    memory_mib: int | None = option(
        None,
        label="Memory",
        unit="MiB",
        minimum=0,
        exclusive=True,
        scope=Scope.POOL,
        help="In place of the hardware's",
    )
    volumes: Mapping[str, str] = option(
        {},
        label="Volumes",
        check=_mount_paths,
        help='{"/data": "name of a Modal volume"}. Missing volumes are created.',
    )
    api_timeout_s: float = request_timeout()
    build_timeout_s: float = option(
        75.0,
        label="Build timeout",
        unit="s",
        minimum=0,
        exclusive=True,
        scope=Scope.EXECUTOR,
        help="Time that a launch waits for an image. Modal continues the build, and the launch "
        "is retried.",
    )
    log_poll_s: float = poll_interval(
        2.0, label="Log poll interval", help="How often a followed log is read"
    )


_HARDWARE: dict[str, Hardware] = {hardware.name: hardware for hardware in TABLE.hardware}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of one Sandbox, as arguments of ``Sandbox.create``."""

    gpu: str | None
    cpu: float | None
    memory: int | None


def machine(options: Options, spec: ReplicaSpec) -> Machine:
    """The resources that ``spec`` requests. Requires that :func:`problems` is empty."""
    hardware = _HARDWARE.get(spec.hardware)
    memory_gib = hardware.memory_gib if hardware else None
    return Machine(
        gpu=options.gpu or (hardware.name if hardware and hardware.gpus else None),
        cpu=options.cpu or (hardware.cpus if hardware else None),
        memory=options.memory_mib or (None if memory_gib is None else int(memory_gib * 1024)),
    )


def problems(options: Options, spec: ReplicaSpec) -> list[Problem]:
    """Errors in the hardware and the region of ``spec``."""
    found = {}
    if spec.hardware not in _HARDWARE and not options.gpu:
        found["hardware"] = f"expected one of {', '.join(_HARDWARE)}, found {spec.hardware!r}"
    if spec.region and spec.region.partition("-")[0] not in REGIONS:
        found["region"] = (
            f"expected one of {', '.join(REGIONS)}, or a part of one, found {spec.region!r}"
        )
    return [Problem(field=field, message=message) for field, message in found.items()]


def check_deployment(name: str) -> None:
    """Raises :class:`LaunchRefused` for a name that cannot be an App and a tag."""
    if not _NAME.fullmatch(name):
        raise LaunchRefused(
            f"deployment: expected {_NAME_RULE} to name an App and tags, found {name!r}"
        )
