"""The card of a model on the Hub: the origin of its weights, and the metrics of their evaluations.

The metrics are in the card's metadata too (``model-index``), which the Hub shows beside the model.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.model_card import HELD_OUT, table_text
from runs.export.hub_files import Extra
from runs.models import Checkpoint, Evaluation, Run

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

MOST_METRICS = 200


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One metric of the weights. ``data`` names what it was measured on."""

    name: str
    value: float
    stderr: float | None
    data: str

    def result(self) -> EvalResult:
        from huggingface_hub import EvalResult  # lazily: web processes do not need it

        return EvalResult(
            task_type="text-generation",
            dataset_type=self.data,
            dataset_name=self.data,
            metric_type=self.name,
            metric_value=self.value,
        )


def _measured(checkpoint: Checkpoint) -> Iterator[Measured]:
    """The metrics of the checkpoint's round: the loss of the replicas, then the evaluations."""
    run: Run = checkpoint.run
    if run.eval_round == checkpoint.round and run.eval_loss and math.isfinite(run.eval_loss):
        yield Measured(name="loss", value=run.eval_loss, stderr=None, data=HELD_OUT)
    evaluations = Evaluation.objects.filter(
        run=run, round=checkpoint.round, state=Evaluation.State.SUCCEEDED
    )
    for evaluation in evaluations.select_related("plan").order_by("plan_id"):
        for name, (value, stderr) in (evaluation.metrics or {}).items():
            yield Measured(name=name, value=value, stderr=stderr, data=evaluation.plan.name)


def _metrics_table(measured: Sequence[Measured]) -> list[str]:
    if not measured:
        return []
    rows = [
        f"| {table_text(metric.data)} | {table_text(metric.name)} | {metric.value:.6g} | "
        f"{'-' if metric.stderr is None else format(metric.stderr, '.2g')} |"
        for metric in measured
    ]
    return [
        "Evaluation of these weights:",
        "",
        "| data | metric | value | standard error |",
        "| --- | --- | ---: | ---: |",
        *rows,
        "",
    ]


def card(
    checkpoint: Checkpoint, repository: str, *, config: bool, model: Extra | None = None
) -> str:
    """The model card (https://huggingface.co/docs/hub/model-cards). ``model`` are the extra files
    of a Transformers model, None for another workload."""
    from huggingface_hub import ModelCardData  # lazily: web processes do not need it

    run: Run = checkpoint.run
    measured = list(itertools.islice(_measured(checkpoint), MOST_METRICS))
    data = ModelCardData(
        library_name="safetensors" if model is None else "transformers",
        pipeline_tag=None if model is None else "text-generation",
        tags=["diloco"],
        model_name=repository if measured else None,
        eval_results=[metric.result() for metric in measured] or None,
    )
    settings = run.settings
    loss = run.eval_loss if checkpoint.final else None
    rows = {
        "Run": table_text(run.name),
        "Weights": f"{'final, ' if checkpoint.final else ''}after round {checkpoint.round}",
        "Replicas": settings.num_replicas,
        "Inner steps per round": settings.sync_every,
        "Codec": settings.codec,
        "Evaluation loss": f"{loss:.4f} (newest, round {run.eval_round})" if loss else "not given",
        "SHA-256 in the run's bucket" if checkpoint.final else "Digest in the run's bucket": (
            f"`{checkpoint.digest}`"
        ),
    }
    if model is not None:
        notes = [
            "`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load this."
            if not model.missing
            else f"Not uploaded: {table_text('; '.join(model.missing))}. Add it, or let"
            " `python -m diloco.export` create a complete directory.",
            "The tensors are those of the bucket; the file's header adds `format: pt`.",
        ]
    else:
        notes = [
            "The files are those of the run's bucket, byte for byte"
            + (" (`config.json` as well)." if config else "; a checkpoint has no `config.json`."),
            "The workload is not `huggingface`, so `from_pretrained` does not load it.",
        ]
    workload = json.dumps(run.workload, indent=2, sort_keys=True)
    lines = [
        "---",
        data.to_yaml(),
        "---",
        f"# {table_text(repository)}",
        "",
        "Trained with DiLoCo: replicas that share a bucket exchange pseudo-gradients.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        *notes,
        "",
        *_metrics_table(measured),
        "The workload:",
        "",
        "```json",
        workload.replace("`", "'"),
        "```",
        "",
    ]
    return "\n".join(lines)
