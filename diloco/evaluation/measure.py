"""One evaluation of one checkpoint: measure, and write the result into the run's bucket."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from diloco.clock import Clock
from diloco.errors import ReplicaError, install_extra
from diloco.evaluation.held_out import HeldOutResult, held_out_loss
from diloco.evaluation.language_model import LanguageModel, language_model
from diloco.evaluation.weights import Weights, load_into
from diloco.protocol import keys
from diloco.protocol.evaluation import (
    LOSS,
    PERPLEXITY,
    EvaluationMetric,
    EvaluationResult,
    EvaluationSpec,
    perplexity,
)
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import BadRecord
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import WORKLOADS
from diloco.store.base import MissingKey, Store
from diloco.workloads import load_workload


def stored_result(store: Store, spec: EvaluationSpec, weights: Weights) -> EvaluationResult | None:
    """Return the result that the bucket has for these weights; None if there is none."""
    try:
        result = EvaluationResult.read(store, keys.evaluation(weights.round, spec.name))
        result.check(round=weights.round, spec=spec)
    except (MissingKey, BadRecord):
        return None
    return result if result.weights == weights.stored.digest else None


def store_result(store: Store, spec: EvaluationSpec, result: EvaluationResult) -> EvaluationResult:
    """Write a result unless another process has; return the one that the bucket has now. A damaged
    one, and one of other weights, are replaced."""
    key = keys.evaluation(result.round, spec.name)
    if store.create(key, result.to_bytes()):
        return result
    try:
        stored = EvaluationResult.read(store, key)
        stored.check(round=result.round, spec=spec)
    except (MissingKey, BadRecord):
        stored = None
    if stored is not None and stored.weights == result.weights:
        return stored
    store.put(key, result.to_bytes())
    return result


def evaluate(
    store: Store,
    document: GroupDocument,
    spec: EvaluationSpec,
    weights: Weights,
    *,
    device: torch.device,
    clock: Clock,
    task_folder: Path | None = None,
) -> EvaluationResult:
    """Measure the weights. ``task_folder`` has definitions of tasks of the user.

    Raises :class:`SettingsError`, :class:`ValueError` and :class:`ReplicaError` if the weights, the
    data or the tasks do not fit, or a result is not a finite number.
    """
    _check_workload(document)
    began_s = clock.monotonic()
    benchmark = _benchmark() if spec.tasks else None
    tensors = weights.load(store)
    metrics: list[EvaluationMetric] = []
    module: nn.Module | None = None
    held_out: HeldOutResult | None = None
    if spec.tokens and not spec.data:
        workload = load_workload(document, replica=0, device=device)
        module = workload.build_model()
        load_into(module, tensors)
        own = workload.evaluate(module)
        held_out = HeldOutResult(loss=own.loss, stderr=None, tokens=own.tokens, data="")
    model: LanguageModel | None = None
    if spec.data or spec.tasks:
        model = language_model(document, device=device, module=module)
        if module is None:
            load_into(model.module, tensors)
    del tensors
    if spec.tokens and spec.data and model is not None:
        held_out = held_out_loss(model, spec.data, tokens=spec.tokens)
    if held_out is not None:
        metrics += _loss_metrics(held_out)
    harness = ""
    if benchmark is not None and model is not None:
        measured = benchmark.run_tasks(
            model, spec.tasks, examples=spec.examples, task_folder=task_folder
        )
        metrics += measured.metrics
        harness = measured.version
    _check_finite(metrics)
    result = EvaluationResult(
        round=weights.round,
        spec=spec.name,
        weights=weights.stored.digest,
        data=held_out.data if held_out else "",
        metrics=tuple(metrics),
        tokens=held_out.tokens if held_out else 0,
        harness=harness,
        device=_device_name(device),
        seconds=round(clock.monotonic() - began_s, 3),
        wall_s=clock.wall(),
    )
    try:
        result.check(round=weights.round, spec=spec)
    except BadRecord as error:  # e.g. more metrics than a result can have
        raise ReplicaError(str(error)) from error
    return result


def _check_workload(document: GroupDocument) -> None:
    kind = document.workload.get("kind")
    if kind not in WORKLOADS:
        raise SettingsError(
            "workload",
            f"expected a workload of kind {' or '.join(WORKLOADS)}, found {kind!r}: the model of "
            "the loop is not in the bucket. Evaluate it in the loop with group.evaluate, or export "
            "its weights",
        )


def _benchmark() -> ModuleType:
    """The module of benchmark tasks. Raises :class:`SettingsError` without lm-eval."""
    try:
        return importlib.import_module("diloco.evaluation.benchmark")
    except ModuleNotFoundError as error:
        raise SettingsError(
            "tasks", f"expected lm-eval, found no {error.name}; {install_extra('evaluation')}"
        ) from None


def _loss_metrics(result: HeldOutResult) -> list[EvaluationMetric]:
    value = perplexity(result.loss)
    stderr = None if result.stderr is None else value * result.stderr
    return [
        EvaluationMetric(name=LOSS, value=result.loss, stderr=result.stderr),
        EvaluationMetric(name=PERPLEXITY, value=value, stderr=stderr),
    ]


def _check_finite(metrics: Sequence[EvaluationMetric]) -> None:
    for metric in metrics:
        if not math.isfinite(metric.value):
            raise ReplicaError(
                f"{metric.name}: expected a finite number, found {metric.value}: the weights are "
                "NaN or the training has diverged"
            )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
