"""Predicts a run before it is launched: utilisation, bytes, goodput, time and cost.

Pure arithmetic, shared by ``python -m diloco.simulate`` and the planner.
:mod:`diloco.protocol.reduce_cost` counts bytes and requests. With H local steps, P fragments and
overlap tau:

- A round computes for ``C = H/P * step_s``. Its exchange takes ``S = up / up_bandwidth + down /
  down_bandwidth + trips * latency``, in sequence, because a payload can be read only after its
  upload; a syncer's own transfers come in between, :data:`SYNCER_SPEED` times as fast.
- ``tau * step_s`` of S overlaps with computation (Streaming DiLoCo, arXiv:2501.18512). The exposed
  part is ``E = max(0, S - tau * step_s, T - C)``, where T is S without latencies: rounds in flight
  share the bandwidth. Utilisation is ``C / (C + E)``.
- Replicas fail and are replaced: :mod:`diloco.planner.availability`.
- Cost: hardware by the hour for every replica, live or not; egress for each byte that a replica
  reads, assuming that all replicas are outside the bucket's region; requests, including those of
  control (:mod:`diloco.protocol.control_pace`).

Not modelled: encoding, checksums and sums (``bench/`` measures them), evaluation, writing
checkpoints, the control plane, replicas of different speed, congestion at the store, storage.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields

from diloco.planner.availability import AvailabilityEstimate, estimate_availability
from diloco.planner.traffic import Traffic, mode_of, modes, round_traffic
from diloco.protocol.control_pace import control_requests
from diloco.protocol.payload_size import FULL_MEAN
from diloco.protocol.reduce_cost import BANDWIDTH, LATENCY_S, SYNCER_SPEED, RoundCost
from diloco.protocol.round_view import GATHER, SYNCER
from diloco.protocol.setting_spec import SettingsError, plain
from diloco.protocol.settings import GroupSettings

CHECKPOINT_BYTES = 8
"""Bytes per parameter of a checkpoint, which a joining replica reads: weights and outer momentum in
fp32."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A group and the world it runs in.

    ``step_s``, ``tokens_per_step`` and ``mtbf_s`` (inf: it never fails) are those of one replica;
    ``replace_s`` is the time from its failure to the start of its successor, ``late_share`` the
    share of contributions that miss their round. Bandwidths are one
    replica's to the bucket. Prices are in one currency, by default those of S3 in dollars.
    """

    settings: GroupSettings
    parameters: int
    step_s: float
    tokens_per_step: int = 0
    up_bytes_per_s: float = BANDWIDTH
    down_bytes_per_s: float = BANDWIDTH
    latency_s: float = LATENCY_S
    mtbf_s: float = math.inf
    replace_s: float = 0.0
    late_share: float = 0.0
    egress_per_gb: float = 0.09
    put_per_million: float = 5.0
    get_per_million: float = 0.4
    replica_per_hour: float = 0.0
    syncer_per_hour: float = 0.0

    def __post_init__(self) -> None:
        positive = {"parameters", "step_s", "up_bytes_per_s", "down_bytes_per_s", "mtbf_s"}
        for name in [field.name for field in fields(self)][1:]:
            value = getattr(self, name)
            is_infinite = name == "mtbf_s" and value == math.inf
            if not (math.isfinite(value) or is_infinite):
                raise SettingsError(name, f"expected a finite number, found {value}")
            if value < 0 or (name in positive and value == 0):
                least = "more than 0" if name in positive else "0 or more"
                raise SettingsError(name, f"expected {least}, found {plain(value)}")
        if self.late_share >= 1:
            raise SettingsError("late_share", f"expected less than 1, found {self.late_share}")
        if self.parameters < self.settings.num_fragments:
            raise SettingsError(
                "parameters",
                f"expected at least one for each of the {self.settings.num_fragments} fragments, "
                f"found {plain(self.parameters)}",
            )

    @property
    def mode(self) -> str:
        """The reduce plan of a full round."""
        return mode_of(self.settings, self.parameters)

    @property
    def compute_s(self) -> float:
        """Compute time of one round in seconds."""
        return self.settings.round_steps * self.step_s

    @property
    def covered_s(self) -> float:
        """Seconds of an exchange that overlap can hide."""
        return self.settings.overlap_steps * self.step_s


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a run, in the scenario's currency."""

    hardware: float
    egress: float
    requests: float

    @property
    def total(self) -> float:
        return self.hardware + self.egress + self.requests


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Times are of one round. ``efficiency`` is goodput times utilisation: the share of N replicas'
    time whose work ends up in the global weights. ``up`` to ``gets`` are totals of the whole run
    over all replicas. ``round_cost`` is the exchange's egress and requests alone."""

    traffic: Traffic
    compute_s: float
    exchange_s: float
    exposed_s: float
    utilisation: float
    outlook: AvailabilityEstimate
    efficiency: float
    rounds: int
    wall_s: float
    tokens: float
    failures: float
    up: float
    down: float
    puts: float
    gets: float
    round_cost: float
    cost: Cost

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def predict(request: PlanRequest) -> PlanEstimate:
    """The whole run, with the reduce plan that the settings name."""
    settings = request.settings
    traffic = round_traffic(settings, request.parameters, mode=request.mode)
    transfer_s, latency_s = exchange_times(request, traffic)
    exchange_s, compute_s = transfer_s + latency_s, request.compute_s
    exposed_s = max(0.0, exchange_s - request.covered_s, transfer_s - compute_s)
    checkpoint_bytes = CHECKPOINT_BYTES * request.parameters
    outlook = estimate_availability(
        settings,
        mtbf_s=request.mtbf_s,
        away_s=request.replace_s + checkpoint_bytes / request.down_bytes_per_s,
        step_s=request.step_s,
        late_share=request.late_share,
    )
    rounds = rounds_of(settings, request.tokens_per_step)
    wall_s = rounds * (compute_s + exposed_s) * outlook.slowdown
    failures = outlook.failures_per_s * wall_s if outlook.failures_per_s else 0.0
    # Number of full rounds with the same traffic as all rounds together.
    full = rounds * outlook.live_share
    live = settings.num_replicas * outlook.live_share if full else 0.0
    control = control_requests(settings, replicas=live, rounds=full, wall_s=wall_s if full else 0.0)
    puts, gets = full * traffic.puts + control.puts, full * traffic.gets + control.gets
    steps = full * outlook.kept_share * settings.num_replicas * settings.round_steps
    catch_up = failures * checkpoint_bytes
    return PlanEstimate(
        traffic=traffic,
        compute_s=compute_s,
        exchange_s=exchange_s,
        exposed_s=exposed_s,
        utilisation=compute_s / (compute_s + exposed_s),
        outlook=outlook,
        efficiency=outlook.goodput * compute_s / (compute_s + exposed_s),
        rounds=rounds,
        wall_s=wall_s,
        tokens=steps * request.tokens_per_step,
        failures=failures,
        up=full * traffic.up,
        down=full * traffic.down + catch_up,
        puts=puts,
        gets=gets,
        round_cost=_egress(request, traffic.egress)
        + _requests(request, traffic.puts, traffic.gets),
        cost=Cost(
            hardware=_hardware(request, wall_s),
            egress=_egress(request, full * traffic.egress + catch_up),
            requests=_requests(request, puts, gets),
        ),
    )


def predict_modes(request: PlanRequest) -> dict[str, PlanEstimate]:
    """The same run with each reduce plan it could use."""
    return {
        mode: predict(dataclasses.replace(request, settings=_with_plan(request.settings, mode)))
        for mode in modes(request.settings)
    }


def _with_plan(settings: GroupSettings, mode: str) -> GroupSettings:
    mean_codec = FULL_MEAN if mode == GATHER else settings.mean_codec
    return dataclasses.replace(settings, reduce_plan=mode, mean_codec=mean_codec)


def rounds_of(settings: GroupSettings, tokens_per_step: int) -> int:
    """Return the rounds until the run ends; with a token limit, up to the round that reaches it."""
    tokens_per_round = settings.round_steps * tokens_per_step * settings.num_replicas
    if not settings.max_tokens or not tokens_per_round:
        return settings.total_rounds
    return min(settings.total_rounds, -(-settings.max_tokens // tokens_per_round))


def exchange_times(request: PlanRequest, traffic: Traffic) -> tuple[float, float]:
    """Seconds of one exchange: transfers, and waiting for first bytes."""
    replica, syncer = traffic.replica, traffic.syncer
    transfer_s = _transfer_s(request, replica) + _transfer_s(request, syncer) / SYNCER_SPEED
    trips = replica.round_trips + syncer.round_trips / SYNCER_SPEED
    return transfer_s, trips * request.latency_s


def bandwidth_for(request: PlanRequest, utilisation: float) -> float:
    """Bytes per second, as much up as down, from which on a plan reaches ``utilisation``; inf where
    latencies alone forbid it."""
    traffic = round_traffic(request.settings, request.parameters, mode=request.mode)
    alike = dataclasses.replace(request, up_bytes_per_s=1.0, down_bytes_per_s=1.0)
    moved, latency_s = exchange_times(alike, traffic)
    return needed_bytes_per_s(
        moved=moved,
        compute_s=request.compute_s,
        covered_s=request.covered_s,
        latency_s=latency_s,
        utilisation=utilisation,
    )


def needed_bytes_per_s(
    *, moved: float, compute_s: float, covered_s: float, latency_s: float, utilisation: float
) -> float:
    """Solve the formula of utilisation for the bandwidth that transfers ``moved`` bytes."""
    allowed_s = compute_s * (1 / utilisation - 1)
    transfer_s = min(allowed_s + covered_s - latency_s, allowed_s + compute_s)
    return moved / transfer_s if transfer_s > 0 else math.inf


def _transfer_s(request: PlanRequest, cost: RoundCost) -> float:
    return cost.up / request.up_bytes_per_s + cost.down / request.down_bytes_per_s


def _hardware(request: PlanRequest, wall_s: float) -> float:
    per_hour = request.settings.num_replicas * request.replica_per_hour
    if request.mode == SYNCER:
        per_hour += request.syncer_per_hour
    return per_hour * wall_s / 3600 if per_hour else 0.0


def _egress(request: PlanRequest, size_bytes: float) -> float:
    return size_bytes / 1e9 * request.egress_per_gb


def _requests(request: PlanRequest, puts: float, gets: float) -> float:
    return puts / 1e6 * request.put_per_million + gets / 1e6 * request.get_per_million
