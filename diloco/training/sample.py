"""A text sample of the final weights, stored beside them.

It shows what a language model has learned without a download of its weights. The replica that
publishes the final weights draws the sample afterwards, so no process waits for it. It takes at
most :data:`SAMPLE_S` plus one step of the model, and an error is only logged. The seed is fixed, so
equal weights give equal text, except for rounding differences between hardware.

There is no sample for models other than language models, for workloads without ``go_on``
(:func:`sampler_of`), and for models that are sharded over several processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from diloco.clock import Clock
from diloco.protocol import keys
from diloco.protocol.records import FinalSample, Identity
from diloco.store.base import Store

log = logging.getLogger(__name__)

SAMPLE_BYTES = 400
SAMPLE_S = 10.0
TEMPERATURE = 0.7
SEED = 0


class GoOn(Protocol):
    """Samples text that continues ``prompt`` ('' is the start of a line), without the prompt."""

    def __call__(self, prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
        """Yield the text so far after each token, until it has ``n`` bytes or ends."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How to sample the model of a run. ``go_on`` is called once the model has the final weights;
    in a replica of several processes, only on the leader."""

    prompt: str
    go_on: GoOn


def sampler_of(workload: object, model: nn.Module) -> Sampler | None:
    """Return the sampler of a workload, or None if it has no ``go_on`` and ``sample_prompt``
    (:class:`~diloco.workloads.byte_gpt.ByteGPTTraining` has both)."""
    go_on = getattr(workload, "go_on", None)
    prompt = getattr(workload, "sample_prompt", None)
    if go_on is None or not isinstance(prompt, str):
        return None

    def bound(prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
        text: Iterator[bytes] = go_on(model, prompt, n, temperature=temperature, seed=seed)
        return text

    return Sampler(prompt=prompt, go_on=bound)


def publish_sample(
    store: Store,
    identity: Identity,
    sampler: Sampler,
    *,
    round: int,
    clock: Clock,
    gave_up: Callable[[], bool] = lambda: False,
) -> None:
    """Draw a sample and store it in the result of ``identity``. Errors are logged, not raised: a
    run without a sample has not failed."""
    try:
        sample = _draw(sampler, round=round, clock=clock, gave_up=gave_up)
        key = keys.final_sample(identity.replica, identity.incarnation)
        store.put(key, sample.to_bytes())
    except Exception as error:
        log.warning("no sample of the final weights: %s: %s", type(error).__name__, error)
    else:
        log.info("a sample of the final weights is published")


def _draw(
    sampler: Sampler, *, round: int, clock: Clock, gave_up: Callable[[], bool]
) -> FinalSample:
    until_s = clock.monotonic() + SAMPLE_S
    text, whole = b"", True
    grown = sampler.go_on(sampler.prompt.encode(), SAMPLE_BYTES, temperature=TEMPERATURE, seed=SEED)
    for text in grown:
        if len(text) < SAMPLE_BYTES and (clock.monotonic() > until_s or gave_up()):
            whole = False
            break
    if not text:
        raise ValueError("expected text, found none")
    return FinalSample(
        round=round,
        prompt=sampler.prompt,
        text=text[:SAMPLE_BYTES].decode(errors="replace"),
        temperature=TEMPERATURE,
        seed=SEED,
        whole=whole,
        wall_s=clock.wall(),
    )
