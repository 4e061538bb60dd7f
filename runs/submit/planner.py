"""What a run will move, reach and cost before it is launched: planner page, submit form and API.

Pure, on the cost model that replicas and ``python -m diloco.simulate`` use
(:mod:`diloco.planner.prediction`). A :class:`Question` is what a person varies; the run is as
long as its tokens say, so that two values of H are two ways to the same end: what failures take
away is trained again, and that is in rounds, bytes, time and money. An :class:`Outline` is the
same of a draft: its length is what its settings say, its money :mod:`runs.submit.forecast`'s.

Left out: what H does to the loss, which no arithmetic tells, and what the cost model leaves out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from diloco.planner.availability import Outlook, look_ahead
from diloco.planner.prediction import (
    CHECKPOINT_BYTES,
    Prediction,
    Scenario,
    bandwidth_for,
    predict,
    rounds_of,
)
from diloco.protocol.payload_size import ring_all_reduce
from diloco.protocol.setting_spec import SettingsError
from diloco.protocol.settings import GroupSettings, setting_fields
from runs.submit.forecast import ByPlace, Forecast, forecast, tokens_per_step
from runs.submit.run_draft import RunDraft

MOST_ROUNDS = int(
    next(spec.maximum for spec in setting_fields() if spec.name == "total_rounds") or 0
)
LARGEST_H = int(next(spec.maximum for spec in setting_fields() if spec.name == "sync_every") or 0)
SWEEP_POINTS = 60
FEWEST_ROUNDS = 10
"""Of the longest H that is looked at: with fewer, the last one's length is all one sees."""
ENOUGH = 0.95
"""Utilisation whose bandwidth is told."""

_UNIMPORTANT: dict[str, Any] = {"warmup_steps": 0, "max_replicas": 99_999}
"""Settings that change no prediction, and over whose defaults a short plan must not stumble."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A group, the machines it runs on and the way to its bucket.

    ``step_s`` and ``tokens_per_step`` are of one inner step of one replica, ``tokens`` of all in
    the whole run. ``mbit_s`` is one replica's bandwidth, as much up as down. ``mtbf_h`` None: no
    replica ever fails; ``replace_s`` passes from its death to its successor's start. ``usd_h`` is
    the price of one replica, None where nobody knows it.
    """

    parameters: int
    num_replicas: int = 4
    sync_every: int = 50
    codec: str = "fp32"
    num_fragments: int = 1
    overlap_steps: int = 0
    reduce_plan: str = "auto"
    min_quorum: int = 1
    step_s: float = 1.0
    tokens_per_step: int = 8192
    tokens: int = 1_000_000_000
    mbit_s: float = 800.0
    latency_s: float = 0.1
    mtbf_h: float | None = None
    replace_s: float = 120.0
    usd_h: float | None = None
    egress_usd_gb: float = 0.09

    @property
    def steps(self) -> int:
        """Inner steps of each replica, if all work is kept."""
        return max(1, -(-self.tokens // (self.tokens_per_step * self.num_replicas)))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``up_bytes`` and ``down_bytes`` are of one round and the replica that moves most,
    ``total_bytes`` of the whole run and everybody. ``exchange_s`` is how long a round's exchange
    takes, ``exposed_s`` what of it overlap does not hide. ``efficiency`` is utilisation times
    goodput. ``reduction``: bytes of a ring all-reduce of fp32 gradients at every step over these.

    None: the run never ends, or (of money) a price is not known, or there is nothing to compare.
    """

    sync_every: int
    reduce_plan: str
    rounds: int | None
    up_bytes: int
    down_bytes: int
    round_bytes: int
    total_bytes: float | None
    reduction: float | None
    compute_s: float
    exchange_s: float
    exposed_s: float
    utilisation: float
    goodput: float
    efficiency: float
    failures: float | None
    wall_s: float | None
    tokens_per_s: float | None
    hardware_usd: float | None
    bucket_usd: float | None
    usd: float | None
    usd_per_billion_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``chosen`` is the question's own H; ``curve`` others beside it, rising. ``best`` is the H of
    the curve with the highest efficiency; ``enough_mbit_s`` the bandwidth from which on utilisation
    is :data:`ENOUGH`, None where latencies alone forbid it."""

    chosen: Answer
    curve: tuple[Answer, ...]
    best: int
    enough_mbit_s: float | None


def plan(question: Question) -> Plan:
    """Raises :class:`SettingsError` at the field that cannot be."""
    chosen = answer(question)
    curve = tuple(
        chosen if h == question.sync_every else answer(dataclasses.replace(question, sync_every=h))
        for h in sweep(question)
    )
    needed = bandwidth_for(_scenario(question, rounds=1), ENOUGH) * 8 / 1e6
    return Plan(
        chosen=chosen,
        curve=curve,
        best=max(curve, key=lambda found: found.efficiency).sync_every,
        enough_mbit_s=needed if math.isfinite(needed) else None,
    )


def sweep(question: Question) -> list[int]:
    """Values of H to look at, evenly spread on a logarithmic scale: multiples of the number of
    fragments, more than the overlap, short enough for some rounds. The question's own is one."""
    fragments = question.num_fragments
    least = max(1, question.overlap_steps // fragments + 1)
    longest = max(question.sync_every, min(LARGEST_H, question.steps // FEWEST_ROUNDS))
    most = max(least, longest // fragments)
    ratio = (most / least) ** (1 / (SWEEP_POINTS - 1))
    found = {round(least * ratio**i) * fragments for i in range(SWEEP_POINTS)}
    return sorted({h for h in found if h <= LARGEST_H} | {question.sync_every})


def answer(question: Question) -> Answer:
    """For the question's own H. Raises :class:`SettingsError` at the field that cannot be."""
    if question.tokens_per_step < 1 or question.tokens < 1:
        field = "tokens" if question.tokens < 1 else "tokens_per_step"
        raise SettingsError(field, f"expected 1 or more, found {getattr(question, field):,}")
    once = _scenario(question, rounds=1)
    outlook = _outlook(once)
    per_round = once.settings.round_steps * question.tokens_per_step * question.num_replicas
    kept = outlook.live_share * outlook.kept_share
    needed = math.ceil(question.tokens / (per_round * kept)) if kept else MOST_ROUNDS + 1
    ends = needed <= MOST_ROUNDS and math.isfinite(outlook.slowdown)
    found = predict(_scenario(question, rounds=needed) if ends else once)
    return _answer(question, found, needed if ends else None)


def _scenario(question: Question, *, rounds: int) -> Scenario:
    names = {field.name for field in dataclasses.fields(Question)}
    settings = {spec.name: getattr(question, spec.name) for spec in setting_fields()
                if spec.name in names}  # fmt: skip
    return Scenario(
        settings=GroupSettings(**(_UNIMPORTANT | settings), total_rounds=rounds),
        parameters=question.parameters,
        step_s=question.step_s,
        tokens_per_step=question.tokens_per_step,
        up_bytes_per_s=question.mbit_s * 1e6 / 8,
        down_bytes_per_s=question.mbit_s * 1e6 / 8,
        latency_s=question.latency_s,
        mtbf_s=math.inf if question.mtbf_h is None else question.mtbf_h * 3600,
        replace_s=question.replace_s,
        egress_per_gb=question.egress_usd_gb,
        replica_per_hour=question.usd_h or 0.0,
    )


def _outlook(scenario: Scenario) -> Outlook:
    checkpoint_s = CHECKPOINT_BYTES * scenario.parameters / scenario.down_bytes_per_s
    return look_ahead(
        scenario.settings,
        mtbf_s=scenario.mtbf_s,
        away_s=scenario.replace_s + checkpoint_s,
        step_s=scenario.step_s,
    )


def _answer(question: Question, found: Prediction, rounds: int | None) -> Answer:
    """``rounds`` None: the run does not end, and what adds up over it is None."""
    traffic, replicas = found.traffic, question.num_replicas
    round_bytes = traffic.up + traffic.down
    ring = replicas * ring_all_reduce(numel=question.parameters, replicas=replicas)
    steps = question.sync_every // question.num_fragments
    bucket = found.cost.egress + found.cost.requests
    usd = None if question.usd_h is None else found.cost.hardware + bucket
    ends = rounds is not None
    return Answer(
        sync_every=question.sync_every,
        reduce_plan=traffic.mode,
        rounds=rounds,
        up_bytes=traffic.replica.up,
        down_bytes=traffic.replica.down,
        round_bytes=round_bytes,
        total_bytes=found.up + found.down if ends else None,
        reduction=ring * steps / round_bytes if replicas > 1 else None,
        compute_s=found.compute_s,
        exchange_s=found.exchange_s,
        exposed_s=found.exposed_s,
        utilisation=found.utilisation,
        goodput=found.outlook.goodput,
        efficiency=found.efficiency,
        failures=found.failures if ends else None,
        wall_s=found.wall_s if ends else None,
        tokens_per_s=found.tokens_per_s if ends else None,
        hardware_usd=found.cost.hardware if ends and question.usd_h is not None else None,
        bucket_usd=bucket if ends else None,
        usd=usd if ends else None,
        usd_per_billion_tokens=usd / found.tokens * 1e9 if ends and usd is not None else None,
    )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a draft will do, in which every replica takes part in every round and none fails.

    ``up_bytes_per_round`` and ``down_bytes_per_round`` are of the replica that moves most.
    ``exchange_s`` is of one round at a common way to the bucket
    (:data:`~diloco.protocol.reduce_cost.BANDWIDTH`, ``LATENCY_S``). ``goodput``, compute over
    compute and the exchange that shows, and ``tokens_per_s`` need the pace of earlier runs, which
    holds their own waiting: they are a little too kind.

    Of somebody's own code nobody knows how large its model and its batches are: then what follows
    from them is None.
    """

    parameters: int | None = None
    reduce_plan: str
    up_bytes_per_round: int | None = None
    down_bytes_per_round: int | None = None
    total_bytes: int | None = None
    reduction: float | None = None
    exchange_s: float | None = None
    goodput: float | None = None
    rounds: int
    steps: int
    tokens: int | None
    tokens_per_round: int | None
    tokens_per_s: float | None
    replicas: int
    money: Forecast


def outline(draft: RunDraft, rates: ByPlace) -> Outline:
    """``rates`` are :func:`runs.submit.throughput_history.known_rates` of the workload."""
    settings = draft.settings
    per_step = tokens_per_step(draft)
    rounds = rounds_of(settings, per_step or 0)
    money = forecast(draft, rates)
    per_round = None
    if per_step is not None:
        per_round = settings.round_steps * per_step * settings.num_replicas
    found = Outline(
        reduce_plan=settings.reduce_plan,
        rounds=rounds,
        steps=rounds * settings.round_steps,
        tokens=None if per_round is None else rounds * per_round,
        tokens_per_round=per_round,
        tokens_per_s=per_round / money.round_s if per_round and money.round_s else None,
        replicas=settings.num_replicas,
        money=money,
    )
    shape = getattr(draft.workload, "shape", None)
    return found if shape is None else _moved(found, settings, shape.parameters)


def _moved(found: Outline, settings: GroupSettings, parameters: int) -> Outline:
    """With what follows from the size of the model."""
    pace = found.money.round_s  # without it, nothing that depends on the length of a step is used
    world = Scenario(
        settings=settings, parameters=parameters, step_s=(pace or 1.0) / settings.round_steps
    )
    predicted = predict(world)
    traffic = predicted.traffic
    per_round = traffic.up + traffic.down
    ring = found.replicas * ring_all_reduce(numel=parameters, replicas=found.replicas)
    return dataclasses.replace(
        found,
        parameters=parameters,
        reduce_plan=traffic.mode,
        up_bytes_per_round=traffic.replica.up,
        down_bytes_per_round=traffic.replica.down,
        total_bytes=found.rounds * per_round,
        reduction=ring * settings.round_steps / per_round if found.replicas > 1 else None,
        exchange_s=predicted.exchange_s,
        goodput=None if pace is None else predicted.utilisation,
    )
