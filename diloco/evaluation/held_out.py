"""The loss on held-out tokens of token shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from diloco.data.shard_index import BadIndex, read_index
from diloco.data.shard_reader import held_out_windows, patient
from diloco.evaluation.language_model import LanguageModel
from diloco.protocol.settings import SettingsError
from diloco.store.base import StoreDenied, StoreError, StoreUnavailable
from diloco.store.open import open_store

WINDOWS = 8
"""Windows per forward pass: a constant, so that no setting changes the result."""


@dataclass(frozen=True, kw_only=True)
class HeldOutResult:
    """Mean loss in nats per token over ``tokens`` tokens. ``stderr`` is the standard error of the
    mean over windows, None for one window. ``data`` is the digest of the index of the shards."""

    loss: float
    stderr: float | None
    tokens: int
    data: str


def held_out_loss(model: LanguageModel, uri: str, *, tokens: int) -> HeldOutResult:
    """Measure the model on about ``tokens`` tokens of the held-out part of the shards at ``uri``,
    in windows of the model's context.

    Raises :class:`SettingsError` if the shards cannot be read or are of another tokenizer, and
    :class:`StoreUnavailable`.
    """
    try:
        store = patient(open_store(uri))
        index = read_index(store)
        if index.tokenizer_digest != model.codec.digest:
            raise BadIndex(
                f"expected shards of the model's tokenizer ({model.codec.digest[:12]}), found "
                f"those of {index.tokenizer!r} ({index.tokenizer_digest[:12]})"
            )
        windows = held_out_windows(store, index, context=model.context, tokens=tokens)
    except (StoreUnavailable, StoreDenied):
        raise
    except (StoreError, BadIndex) as error:
        raise SettingsError("data", f"expected token shards at {uri}: {error}") from error
    losses: list[float] = []
    for start in range(0, len(windows), WINDOWS):
        rows = torch.from_numpy(windows[start : start + WINDOWS].astype(np.int64))
        rows = rows.to(model.device)
        logits = model.logits(rows[:, :-1])
        each = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        losses += each.double().mean(dim=1).tolist()
    mean = math.fsum(losses) / len(losses)
    spread = math.fsum((loss - mean) ** 2 for loss in losses)
    stderr = math.sqrt(spread / (len(losses) - 1) / len(losses)) if len(losses) > 1 else None
    return HeldOutResult(
        loss=mean, stderr=stderr, tokens=windows.shape[0] * model.context, data=index.digest
    )
