"""A sample of text from the final weights, drawn by whoever published them and stored beside them.

So a person sees what a language model has learnt without fetching its weights. It is drawn after
the final manifest is there, so nobody waits for it; it takes :data:`SAMPLE_S` at most, and a step
of the model more; and whatever goes wrong is a line in the log, never the end of a run. The seed is
fixed: the same weights give the same text, but for what hardware rounds differently.

What it leaves out: models that are no language models, workloads that cannot do it
(:func:`sampler_of` has none), and models whose weights are spread over several processes.
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
    """Text that goes on from ``prompt`` ('' is the start of a line), which is not repeated."""

    def __call__(self, prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
        """All of it so far, again and again, until it is ``n`` bytes long or has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the model of a run is sampled; ``go_on`` is called when it has the final weights. Of a
    replica of several processes it is called in one of them alone."""

    prompt: str
    go_on: GoOn


def sampler_of(workload: object, model: nn.Module) -> Sampler | None:
    """How ``workload`` samples ``model``; None where it does not say (``go_on`` and
    ``sample_prompt``, as :class:`~diloco.workloads.byte_gpt.ByteGPTTraining` has them)."""
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
    """Draw a sample and store it in ``identity``'s result. Does not raise: the result is there, and
    a run has not failed for want of a sample."""
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
