"""What :class:`executors.modal.executor.ModalExecutor` can be told, and what a spec may ask for.

``docs/backends/modal.md`` describes every option; here is what each must look like. Options of a
spec replace those of the same name of the executor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from executors.base import LaunchRefused, Problem, ReplicaSpec
from executors.catalogue import Hardware
from executors.modal.hardware import TABLE

MAX_LIFETIME_S = 24 * 3600.0
"""Modal's own limit (https://modal.com/docs/guide/sandboxes); it defaults to five minutes."""

REGIONS = (
    *("us", "us-east", "us-central", "us-south", "us-west", "ca", "mx", "sa"),
    *("eu", "eu-west", "eu-north", "eu-south", "uk"),
    *("ap", "ap-northeast", "ap-southeast", "ap-south", "ap-melbourne", "jp", "au", "me", "af"),
)
"""Broad regions and parts of them (https://modal.com/docs/guide/region-selection). The names of the
clouds' own (``us-east-1``) start with one of these, and Modal judges them."""

OF_EXECUTOR = ("app", "environment", "api_timeout_s", "build_timeout_s", "log_poll_s")
"""Options of the executor as a whole, which a spec cannot change."""

POOL_OPTIONS = frozenset(
    {"add_python", "python_version", "requirements", "extra_index_url", "cpu", "memory_mib"}
)
"""Options a pool can set by itself. ``volumes`` and ``registry_secret`` reach into the workspace,
``gpu`` asks for a machine that the catalogue's price does not cover."""

_NUMBERS = ("cpu", "api_timeout_s", "build_timeout_s", "log_poll_s")
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,63}")
_NAME_MUST_BE = "1 to 63 letters, digits, '.', '_' or '-'"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one job, checked. Empty and None mean: leave it to us or to Modal."""

    app: str = ""
    environment: str = ""
    image: str = ""
    registry_secret: str = ""
    add_python: str = ""
    python_version: str = "3.12"
    requirements: tuple[str, ...] | None = None
    extra_index_url: str = ""
    gpu: str = ""
    cpu: float | None = None
    memory_mib: int | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    api_timeout_s: float = 30.0
    build_timeout_s: float = 75.0
    log_poll_s: float = 2.0


OPTIONS = tuple(option.name for option in fields(Options))

_HARDWARE: dict[str, Hardware] = {hardware.name: hardware for hardware in TABLE.hardware}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one Sandbox asks for, in the words of ``Sandbox.create``."""

    gpu: str | None
    cpu: float | None
    memory: int | None


def read(of_executor: Mapping[str, Any], of_spec: Mapping[str, Any]) -> Options:
    """The options of one job. Raises :class:`LaunchRefused` for what they cannot be."""
    fixed = sorted(set(of_spec) & set(OF_EXECUTOR))
    if fixed:
        raise LaunchRefused(f"{', '.join(fixed)}: expected in the executor's options, not a job's")
    given = {**of_executor, **of_spec}
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise LaunchRefused(f"options: expected {', '.join(OPTIONS)}, found {', '.join(unknown)}")
    return Options(**{name: _checked(name, value) for name, value in given.items()})


def machine(options: Options, spec: ReplicaSpec) -> Machine:
    """What ``spec`` asks for; to be called where :func:`problems` finds none."""
    hardware = _HARDWARE.get(spec.hardware)
    memory_gib = hardware.memory_gib if hardware else None
    return Machine(
        gpu=options.gpu or (hardware.name if hardware and hardware.gpus else None),
        cpu=options.cpu or (hardware.cpus if hardware else None),
        memory=options.memory_mib or (None if memory_gib is None else int(memory_gib * 1024)),
    )


def problems(of_executor: Mapping[str, Any], spec: ReplicaSpec) -> list[Problem]:
    """What is wrong with ``spec`` without asking anybody."""
    found = []
    try:
        options = read(of_executor, spec.options)
    except LaunchRefused as error:
        return [Problem(field="options", message=str(error))]
    if spec.hardware not in _HARDWARE and not options.gpu:
        known = ", ".join(_HARDWARE)
        found.append(
            Problem(field="hardware", message=f"expected one of {known}, found {spec.hardware!r}")
        )
    if spec.timeout_s is not None and not 0 < spec.timeout_s <= MAX_LIFETIME_S:
        found.append(
            Problem(
                field="timeout_s",
                message=f"expected at most {MAX_LIFETIME_S:.0f} seconds, which is what Modal "
                f"allows, and more than none, found {spec.timeout_s:g}",
            )
        )
    if spec.spot:
        found.append(
            Problem(field="spot", message="expected no: Modal sells no spot capacity by itself")
        )
    if spec.region and spec.region.partition("-")[0] not in REGIONS:
        found.append(
            Problem(
                field="region",
                message=f"expected one of {', '.join(REGIONS)}, or a part of one, "
                f"found {spec.region!r}",
            )
        )
    return found


def check_deployment(name: str) -> None:
    """Raises :class:`LaunchRefused` for a name that is none for an App and a tag."""
    if not _NAME.fullmatch(name):
        raise LaunchRefused(
            f"deployment: expected {_NAME_MUST_BE} to name an App and tags, found {name!r}"
        )


def _checked(name: str, value: Any) -> Any:
    if name in _NUMBERS or name == "memory_mib":
        whole = name == "memory_mib"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise _refused(name, f"a {'whole ' if whole else ''}number", value)
        if value <= 0:
            raise _refused(name, "more than 0", value)
        return value if whole else float(value)
    if name == "requirements":
        if isinstance(value, str) or not all(isinstance(each, str) for each in value):
            raise _refused(name, "a list of pip requirements", value)
        return tuple(value)
    if name == "volumes":
        if not isinstance(value, Mapping) or not all(
            isinstance(each, str) and str(path).startswith("/") for path, each in value.items()
        ):
            raise _refused(name, "a mapping of absolute paths to the names of volumes", value)
        return dict(value)
    if not isinstance(value, str):
        raise _refused(name, "a text", value)
    if name in ("app", "environment") and value and not _NAME.fullmatch(value):
        raise _refused(name, _NAME_MUST_BE, value)
    return value


def _refused(name: str, expected: str, found: object) -> LaunchRefused:
    return LaunchRefused(f"option {name}: expected {expected}, found {found!r}")
