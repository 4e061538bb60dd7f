"""Benchmark tasks of EleutherAI's ``lm-eval``, on a model of a run.

:class:`HarnessModel` is a model for ``lm_eval.simple_evaluate``: the harness chooses prompts and
metrics, the run's model scores them. Answers are scored in batches of equal size on every device,
so that a result does not depend on memory. Needs the extra ``evaluation``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from diloco.evaluation.language_model import LanguageModel
from diloco.protocol.evaluation import EvaluationMetric, metric_name
from diloco.protocol.settings import SettingsError
from diloco.store.base import StoreUnavailable

BATCH = 8
NEW_TOKENS = 256
"""Tokens generated for an answer, if the task sets no limit."""
BOOTSTRAPS = 1000
"""Repetitions for the standard error of metrics that have no formula."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Metrics of all tasks, and the version of lm-eval."""

    metrics: tuple[EvaluationMetric, ...]
    version: str


def run_tasks(
    model: LanguageModel,
    tasks: Sequence[str],
    *,
    examples: int = 0,
    task_folder: Path | None = None,
) -> Measured:
    """Run tasks by name on the first ``examples`` of each (0: all).

    Raises :class:`SettingsError` for an unknown task, and :class:`StoreUnavailable` if the data of
    a task cannot be downloaded.
    """
    manager = _task_manager(tasks, task_folder)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise SettingsError(
            "tasks", f"expected tasks of lm-eval {lm_eval.__version__}, found {unknown[0]!r}"
        )
    try:
        output = lm_eval.simple_evaluate(
            model=HarnessModel(model),
            tasks=list(tasks),
            limit=examples or None,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=BOOTSTRAPS,
        )
    except OSError as error:  # of the Hub and of files of a data set
        raise StoreUnavailable(f"tasks: the data could not be loaded: {error}") from error
    assert output is not None  # only on other ranks
    metrics = tuple(_metrics(output["results"], tasks))
    return Measured(metrics=metrics, version=str(lm_eval.__version__))


def _task_manager(tasks: Sequence[str], folder: Path | None) -> Any:
    """The definitions of the folder; those of lm-eval only if they are needed, because there are
    thousands of files."""
    if folder is not None:
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    return TaskManager(include_path=None if folder is None else str(folder))


def _metrics(
    results: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]
) -> Iterator[EvaluationMetric]:
    """The metrics of the requested tasks and groups; of a tag, those of all its tasks."""
    named = [name for name in tasks if name in results]
    for task in named if len(named) == len(tasks) else results:
        for key, value in results[task].items():
            name, _, variant = key.partition(",")
            if not isinstance(value, int | float) or name.endswith("_stderr") or not variant:
                continue
            stderr = results[task].get(f"{name}_stderr,{variant}")
            yield EvaluationMetric(
                name=metric_name(task, name, "" if variant == "none" else variant),
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, float) and stderr >= 0 else None,
            )


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A language model of a run as lm-eval uses it."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self._model = model

    @property
    def eot_token_id(self) -> int:
        return self._model.codec.end or 0

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokens without special ones, as in training."""
        return [int(token) for token in self._model.codec.encode([string])[0]]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the most likely one. A context
        that is too long loses its beginning."""
        scored: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n][1] + requests[n][2]))
        for start in range(0, len(order), BATCH):
            numbers = order[start : start + BATCH]
            rows = [(requests[n][1] or [self.eot_token_id], requests[n][2]) for n in numbers]
            for number, score in zip(numbers, self._score(rows), strict=True):
                scored[number] = score
        return scored

    def _score(self, rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """Score pairs of a context and a continuation in one forward pass."""
        longest = self._model.context
        whole = [(context + answer)[-(longest + 1) :] for context, answer in rows]
        width = max(len(tokens) for tokens in whole) - 1
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, tokens in enumerate(whole):
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        logits = self._model.logits(inputs.to(self._model.device)).log_softmax(dim=-1).cpu()
        for row, (tokens, (_, answer)) in enumerate(zip(whole, rows, strict=True)):
            count = min(len(answer), len(tokens) - 1)
            target = torch.tensor(tokens[len(tokens) - count :], dtype=torch.int64)
            scores = logits[row, len(tokens) - 1 - count : len(tokens) - 1]
            likelihood = float(scores.gather(1, target[:, None]).double().sum())
            yield likelihood, bool((scores.argmax(dim=-1) == target).all())

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once."""
        result = []
        for request in requests:
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._model.context,
                context_len=1,
            )
            pairs = [
                (None, list(context), list(answer))
                for context, answer in map(utils.make_disjoint_window, windows)
            ]
            result.append(math.fsum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return result

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """The most likely continuation, up to the first of the strings that end it."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, prompt: str, options: Mapping[str, Any]) -> str:
        ends = options.get("until") or []
        ends = [ends] if isinstance(ends, str) else list(ends)
        tokens = self.tok_encode(prompt) or [self.eot_token_id]
        first = len(tokens)
        text = ""
        for _ in range(int(options.get("max_gen_toks") or NEW_TOKENS)):
            window = torch.tensor([tokens[-self._model.context :]], device=self._model.device)
            token = int(self._next(window))
            if token == self._model.codec.end and not ends:
                break
            tokens.append(token)
            text = self._model.codec.decode(tokens[first:]).decode(errors="replace")
            if found := [text.index(end) for end in ends if end and end in text]:
                return text[: min(found)]
        return text

    def _next(self, window: Tensor) -> Tensor:
        return self._model.logits(window)[0, -1].argmax()
