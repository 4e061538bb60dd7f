"""What can be trained. A workload document's ``kind`` names the class; a new kind is added here."""

from __future__ import annotations

import torch

from diloco.rendezvous.settings import GroupDocument, SettingsError
from diloco.rendezvous.workload import ByteGPTWorkload
from diloco.workloads.base import HeldOutLoss, Workload
from diloco.workloads.byte_gpt import ByteGPTTraining
from diloco.workloads.text import load_corpus

__all__ = ["HeldOutLoss", "Workload", "load_workload"]


def load_workload(document: GroupDocument, *, replica: int, device: torch.device | str) -> Workload:
    """The workload of ``document`` for one replica, its data already read.

    The shard is ``replica`` modulo ``max_replicas``: a number above that takes over the shard of a
    replica long gone. :class:`SettingsError` where the document or its data is not as it should be.
    """
    kind = document.workload.get("kind")
    if kind != ByteGPTWorkload.kind:
        raise SettingsError("workload", f"expected kind {ByteGPTWorkload.kind!r}, found {kind!r}")
    workload = ByteGPTWorkload.from_dict(document.workload)
    settings = document.settings
    corpus = load_corpus(
        workload.data,
        shard=replica % settings.max_replicas,
        shards=settings.max_replicas,
        context=workload.shape.context,
        eval_bytes=workload.eval_bytes,
    )
    return ByteGPTTraining(workload, settings, corpus, replica=replica, device=torch.device(device))
