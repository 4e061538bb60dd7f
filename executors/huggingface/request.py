"""Parts of a request to Hugging Face Jobs: flavours, labels and volumes."""

from __future__ import annotations

import re

from huggingface_hub import Volume
from huggingface_hub.errors import HfUriError
from huggingface_hub.utils import parse_hf_mount  # type: ignore[attr-defined]

from executors import options as declared
from executors.base import ReplicaSpec
from executors.huggingface.options import Options

LABEL_CHARS = 100

_FLAVOURS = {"cpu": "cpu-basic"}
_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9_-]")


def flavour(spec: ReplicaSpec) -> str:
    return _FLAVOURS.get(spec.hardware, spec.hardware)


def label(text: str) -> str:
    """``text`` as a valid label of the Hub (``HfApi.update_job_labels``)."""
    return _NOT_IN_A_LABEL.sub("-", text)[:LABEL_CHARS]


def volumes_of(spec: ReplicaSpec, options: Options) -> list[Volume]:
    """The volumes of the executor, then those of the spec. Raises :class:`ValueError`."""
    own = declared.read(Options, {}, spec.options)
    volumes = []
    for text in (*options.volumes, *own.volumes):
        try:
            mount = parse_hf_mount(text)
        except HfUriError as error:
            raise ValueError(f"volumes: {error}") from error
        volumes.append(
            Volume(
                type=mount.source.type,
                source=mount.source.id,
                mount_path=mount.mount_path,
                revision=mount.source.revision,
                read_only=mount.read_only,
                path=mount.source.path_in_repo or None,
            )
        )
    return volumes
