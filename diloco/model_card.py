"""The model card of exported weights (https://huggingface.co/docs/hub/model-cards), without torch:
the run that trained them, and their loss, which the Hub shows beside the model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.protocol.group_document import GroupDocument

NAME = "README.md"
GENERATED = (
    "<!-- Written by diloco.export, which replaces this file. Delete this line to keep it. -->"
)
HELD_OUT = "held-out data of the run"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights come from. ``summary`` is the content of ``final/*/summary.json``, empty for a
    checkpoint; ``library`` loads the weights (``transformers`` or ``peft``)."""

    document: GroupDocument
    source: str
    round: int
    library: str
    summary: Mapping[str, Any]

    @property
    def eval_loss(self) -> float | None:
        """The loss on held-out data, if it was measured after the round of the weights."""
        loss = self.summary.get("eval_loss")
        if self.summary.get("eval_round") != self.round or not isinstance(loss, float):
            return None
        return loss if math.isfinite(loss) else None


def write_card(folder: Path, origin: Origin) -> None:
    """Write the card into a directory, unless it has one that was not written by this function."""
    path = folder / NAME
    if path.exists() and GENERATED not in path.read_text(errors="replace"):
        return
    path.write_text(card(origin))


def card(origin: Origin) -> str:
    """The text of the card, in Markdown with metadata in front."""
    from huggingface_hub import EvalResult, ModelCardData  # lazily: web processes do not need it

    settings, name = origin.document.settings, table_text(origin.document.name)
    loss = origin.eval_loss
    result = EvalResult(
        task_type="text-generation",
        dataset_type="held-out",
        dataset_name=HELD_OUT,
        metric_type="loss",
        metric_value=loss,
    )
    data = ModelCardData(
        library_name=origin.library,
        pipeline_tag="text-generation",
        tags=["diloco"],
        model_name=name if loss is not None else None,
        eval_results=[result] if loss is not None else None,
    )
    tokens = origin.summary.get("tokens")
    rows = {
        "Run": name,
        "Weights": table_text(origin.source),
        "Tokens": f"{tokens:,}" if isinstance(tokens, int) else "not given",
        "Loss on held-out data": "not measured" if loss is None else f"{loss:.4f}",
        "Replicas": settings.num_replicas,
        "Inner steps per round": settings.sync_every,
        "Codec": settings.codec,
    }
    lines = [
        "---",
        data.to_yaml(),
        "---",
        GENERATED,
        f"# {name}",
        "",
        "Trained with DiLoCo: replicas that share a bucket exchange pseudo-gradients.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {row} | {value} |" for row, value in rows.items()),
        "",
    ]
    return "\n".join(lines)


def table_text(text: str) -> str:
    """User text that is safe inside a Markdown table."""
    return re.sub(r"[|`<>\[\]\r\n\\]", " ", text).strip() or "a run"
