"""What can be asked of Hugging Face Jobs: options, flavours, labels and volumes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from huggingface_hub import Volume
from huggingface_hub.errors import HfUriError
from huggingface_hub.utils import parse_hf_mount  # type: ignore[attr-defined]

from executors.base import Problem, ReplicaSpec

DEFAULT_IMAGE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"

MAX_TIMEOUT_S = 3 * 24 * 3600.0
"""The Hub documents no longest timeout; its users report that it takes this one."""

POOL_OPTIONS: frozenset[str] = frozenset()
"""Options a pool can set by itself: none. ``volumes`` mounts whatever the token can read."""

LABEL_CHARS = 100

_FLAVOURS = {"cpu": "cpu-basic"}
_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The executor's own options.

    ``namespace`` is the user or organisation that owns the jobs and pays for them, empty for the
    token's user. ``volumes`` are mounted in every job: ``hf://buckets/OWNER/NAME:/path[:ro]``, as
    ``hf jobs run --volume`` takes them. ``max_timeout_s`` is what a job without a deadline gets.
    """

    namespace: str = ""
    image: str = DEFAULT_IMAGE
    volumes: Sequence[str] = ()
    max_timeout_s: float = MAX_TIMEOUT_S
    endpoint: str | None = None
    request_timeout_s: float = 30.0
    poll_s: float = 5.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Raises :class:`ValueError` for an option nobody knows."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"options: expected {', '.join(known)}, found {unknown}")
        return cls(**given)


def flavour(spec: ReplicaSpec) -> str:
    return _FLAVOURS.get(spec.hardware, spec.hardware)


def label(text: str) -> str:
    """``text`` as far as a label of the Hub can say it (``HfApi.update_job_labels``)."""
    return _NOT_IN_A_LABEL.sub("-", text)[:LABEL_CHARS]


def volumes_of(spec: ReplicaSpec, options: Options) -> list[Volume]:
    """Raises :class:`ValueError` for one that cannot be read."""
    if unknown := sorted(set(spec.options) - {"volumes"}):
        raise ValueError(f"options of a replica: expected volumes, found {unknown}")
    made = []
    for text in (*options.volumes, *spec.options.get("volumes", ())):
        try:
            mount = parse_hf_mount(text)
        except HfUriError as error:
            raise ValueError(f"volumes: {error}") from error
        made.append(
            Volume(
                type=mount.source.type,
                source=mount.source.id,
                mount_path=mount.mount_path,
                revision=mount.source.revision,
                read_only=mount.read_only,
                path=mount.source.path_in_repo or None,
            )
        )
    return made


def unsound(spec: ReplicaSpec, options: Options) -> list[Problem]:
    """What is wrong with the request by itself."""
    found = []
    if spec.timeout_s is not None and not 0 < spec.timeout_s <= options.max_timeout_s:
        message = f"expected up to {options.max_timeout_s:g} s, found {spec.timeout_s:g} s"
        found.append(Problem(field="timeout_s", message=message))
    if spec.spot:
        found.append(Problem(field="spot", message="expected no spot: the Hub has none"))
    if spec.region:
        message = f"expected no region: the Hub chooses, found {spec.region!r}"
        found.append(Problem(field="region", message=message))
    try:
        volumes_of(spec, options)
    except ValueError as error:
        found.append(Problem(field="options", message=str(error)))
    return found
