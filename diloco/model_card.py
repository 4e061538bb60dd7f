"""The model card of weights (https://huggingface.co/docs/hub/model-cards), without torch: the run
that trained them, and their metrics.

The metrics are in the card's metadata too (``model-index``), which the Hub shows beside the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

NAME = "README.md"
GENERATED = (
    "<!-- Written by diloco.export, which replaces this file. Delete this line to keep it. -->"
)
HELD_OUT = "held-out data of the run"
TEXT_GENERATION = "text-generation"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of the weights. ``data`` names what it was measured on."""

    name: str
    value: float
    stderr: float | None = None
    data: str = HELD_OUT

    def result(self) -> EvalResult:
        from huggingface_hub import EvalResult  # lazily: web processes do not need it

        return EvalResult(
            task_type=TEXT_GENERATION,
            dataset_type=self.data,
            dataset_name=self.data,
            metric_type=self.name,
            metric_value=self.value,
        )


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content of a card. ``title``, ``run`` and the keys and texts of metrics can be any text;
    ``rows`` and ``notes`` are Markdown. ``library`` loads the weights."""

    title: str
    run: str
    weights: str
    settings: GroupSettings
    library: str
    rows: Mapping[str, str]
    metrics: Sequence[Metric] = ()
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The text, with the metadata in front."""
        from huggingface_hub import ModelCardData  # lazily: web processes do not need it

        data = ModelCardData(
            library_name=self.library,
            pipeline_tag=None if self.library == "safetensors" else TEXT_GENERATION,
            tags=["diloco"],
            model_name=table_text(self.title) if self.metrics else None,
            eval_results=[metric.result() for metric in self.metrics] or None,
        )
        rows = {
            "Run": table_text(self.run),
            "Weights": table_text(self.weights),
            "Replicas": self.settings.num_replicas,
            "Inner steps per round": self.settings.sync_every,
            "Codec": self.settings.codec,
            **self.rows,
        }
        lines = [
            "---",
            data.to_yaml(),
            "---",
            f"# {table_text(self.title)}",
            "",
            "Trained with DiLoCo: replicas that share a bucket exchange pseudo-gradients.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            *self._metrics_table(),
            *self.notes,
            "",
        ]
        return "\n".join(lines)

    def _metrics_table(self) -> list[str]:
        if not self.metrics:
            return []
        return [
            "Evaluation of these weights:",
            "",
            "| data | metric | value | standard error |",
            "| --- | --- | ---: | ---: |",
            *(
                f"| {table_text(metric.data)} | {table_text(metric.name)} | {metric.value:.6g} | "
                f"{'-' if metric.stderr is None else format(metric.stderr, '.2g')} |"
                for metric in self.metrics
            ),
            "",
        ]


def card_of_export(
    document: GroupDocument, *, source: str, round: int, library: str, summary: Mapping[str, Any]
) -> Card:
    """The card of exported weights.

    Args:
        source: origin of the weights, ``"final weights, round 7"``.
        round: number of their round.
        summary: content of ``final/*/summary.json``; empty for a checkpoint.
    """
    loss, tokens = summary.get("eval_loss"), summary.get("tokens")
    metrics = []
    if isinstance(loss, float) and math.isfinite(loss) and summary.get("eval_round") == round:
        metrics = [Metric(name="loss", value=loss)]
    return Card(
        title=document.name,
        run=document.name,
        weights=source,
        settings=document.settings,
        library=library,
        rows={"Tokens": f"{tokens:,}" if isinstance(tokens, int) else "not given"},
        metrics=metrics,
        notes=[GENERATED],
    )


def write_card(folder: Path, card: Card) -> None:
    """Write the card into a directory, unless it has one without :data:`GENERATED`."""
    path = folder / NAME
    if path.exists() and GENERATED not in path.read_text("utf-8", errors="replace"):
        return
    path.write_text(card.markdown(), "utf-8", errors="replace")


def table_text(text: str) -> str:
    """User text that is safe inside a Markdown table."""
    return re.sub(r"[|`<>\[\]\r\n\\]", " ", text).strip() or "a run"
