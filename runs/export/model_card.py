"""The card of a checkpoint that the server uploads to the Hub: :mod:`diloco.model_card` with the
evaluations of the checkpoint's round and the workload."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

from diloco.model_card import Card, Metric, table_text
from runs.export.hub_files import Extra
from runs.models import Checkpoint, Evaluation, Run

MOST_METRICS = 200


def _metrics(checkpoint: Checkpoint) -> Iterator[Metric]:
    """The metrics of the checkpoint's round: the loss of the replicas, then the evaluations."""
    run: Run = checkpoint.run
    if run.eval_round == checkpoint.round and run.eval_loss and math.isfinite(run.eval_loss):
        yield Metric(name="loss", value=run.eval_loss)
    evaluations = Evaluation.objects.filter(
        run=run, round=checkpoint.round, state=Evaluation.State.SUCCEEDED
    )
    for evaluation in evaluations.select_related("plan").order_by("plan_id"):
        for name, (value, stderr) in (evaluation.metrics or {}).items():
            yield Metric(name=name, value=value, stderr=stderr, data=evaluation.plan.name)


def card(
    checkpoint: Checkpoint, repository: str, *, config: bool, model: Extra | None = None
) -> str:
    """The text of the card. ``model`` are the extra files of a Transformers model, None for another
    workload."""
    run: Run = checkpoint.run
    loss = run.eval_loss if checkpoint.final else None
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
    workload = json.dumps(run.workload, indent=2, sort_keys=True).replace("`", "'")
    return Card(
        title=repository,
        run=run.name,
        weights=f"{'final, ' if checkpoint.final else ''}after round {checkpoint.round}",
        settings=run.settings,
        library="safetensors" if model is None else "transformers",
        rows={
            "Evaluation loss": f"{loss:.4f} (newest, round {run.eval_round})"
            if loss
            else "not given",
            "SHA-256 in the run's bucket" if checkpoint.final else "Digest in the run's bucket": (
                f"`{checkpoint.digest}`"
            ),
        },
        metrics=list(itertools.islice(_metrics(checkpoint), MOST_METRICS)),
        notes=[*notes, "", "The workload:", "", "```json", workload, "```"],
    ).markdown()
