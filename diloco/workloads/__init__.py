"""Workloads: model, data and loss of a run. :func:`load_workload` maps each ``kind`` to a class."""

from __future__ import annotations

import torch

from diloco.errors import install_extra
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import (
    BYTES,
    SHARDS,
    VOCABULARY,
    WORKLOADS,
    ByteGPTWorkload,
    CustomWorkload,
    HuggingFaceWorkload,
)
from diloco.workloads.base import HeldOutLoss, Workload
from diloco.workloads.byte_gpt import ByteGPTTraining
from diloco.workloads.custom import load_custom
from diloco.workloads.sharded import (
    RandomWindows,
    Tokens,
    TrainingData,
    load_shards,
)
from diloco.workloads.text import load_corpus

__all__ = ["HeldOutLoss", "Workload", "load_workload"]


def load_workload(document: GroupDocument, *, replica: int, device: torch.device | str) -> Workload:
    """Load the workload of ``document`` for one replica, including its data.

    Raises :class:`SettingsError` if the workload document or the data is invalid, and
    :class:`ValueError` for a replica number without a data shard.
    """
    settings = document.settings
    if not 0 <= replica < settings.max_replicas:
        raise ValueError(
            f"expected a replica number from 0 to {settings.max_replicas - 1}, one for each data "
            f"shard, found {replica}"
        )
    device = torch.device(device)
    kind = document.workload.get("kind")
    if kind == ByteGPTWorkload.kind:
        workload = ByteGPTWorkload.from_dict(document.workload)
        train, held_out = _load_bytes(workload, settings, replica)
        return ByteGPTTraining(workload, settings, train, held_out, device=device)
    if kind == HuggingFaceWorkload.kind:
        described = HuggingFaceWorkload.from_dict(document.workload)
        try:
            from diloco.workloads.huggingface import load_training
        except ModuleNotFoundError as error:
            raise SettingsError(
                "workload",
                f"expected {error.name} for kind {kind!r}, found none; "
                f"{install_extra('transformers')}",
            ) from None
        return load_training(described, settings, replica=replica, device=device)
    if kind == CustomWorkload.kind:
        own = CustomWorkload.from_dict(document.workload)
        return load_custom(own, settings, replica=replica, device=device)
    expected = " or ".join(map(repr, WORKLOADS))
    raise SettingsError("workload", f"expected kind {expected}, found {kind!r}")


def _load_bytes(
    workload: ByteGPTWorkload, settings: GroupSettings, replica: int
) -> tuple[TrainingData, Tokens]:
    """Return the training data and the held-out windows of one replica of the byte-level GPT."""
    context, tokens = workload.shape.context, workload.eval_bytes
    if workload.data_format == SHARDS:
        return load_shards(
            workload.data,
            settings,
            replica=replica,
            context=context,
            eval_tokens=tokens,
            vocabulary=VOCABULARY,
            digest=BYTES,
            coverage=workload.data_coverage,
        )
    corpus = load_corpus(
        workload.data,
        shard=replica,
        shards=settings.max_replicas,
        context=context,
        eval_bytes=tokens,
    )
    train = RandomWindows(corpus.train, settings, replica=replica, context=context)
    return train, corpus.held_out
