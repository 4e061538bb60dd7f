"""What a plan will do before it is launched: utilisation, bytes, goodput, time and money.

Pure arithmetic; the command ``python -m diloco.simulate`` and the planner share it. Bytes and
requests are :mod:`diloco.protocol.reduce_cost`'s. With H local steps, P fragments, overlap tau:

- A round computes for ``C = H/P * step_s``. Its exchange takes ``S = up / up_bandwidth +
  down / down_bandwidth + trips * latency``, one after the other, because nobody can read what has
  not been uploaded; a syncer's own transfers come in between, :data:`SYNCER_SPEED` times as fast.
- Of S, ``tau * step_s`` lies under computation (Streaming DiLoCo, arXiv:2501.18512). What shows is
  ``E = max(0, S - tau * step_s, T - C)``, where T is S without latencies: when several rounds are
  open they share the line. Utilisation is ``C / (C + E)``.
- Replicas fail and are replaced: :mod:`diloco.planner.availability`.
- Money: hardware by the hour for every replica, away or not; egress for each byte that a replica
  reads, as if all stood outside the bucket's region; requests, leases and telemetry included.

Left out: encoding, checksums and sums (``bench/`` measures them), evaluation, checkpoints being
written, the control plane, replicas of different speed, congestion at the store, storage.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields

from diloco.planner.availability import Outlook, look_ahead
from diloco.planner.traffic import Traffic, mode_of, modes, round_traffic
from diloco.protocol.reduce_cost import BANDWIDTH, LATENCY_S, SYNCER_SPEED, RoundCost
from diloco.protocol.round_view import SYNCER
from diloco.protocol.setting_spec import SettingsError, plain
from diloco.protocol.settings import GroupSettings

CHECKPOINT_BYTES = 8
"""Per parameter: weights and outer momentum, fp32. A joiner reads them."""
BEAT_INTERVAL_S = 2.0
BEAT_PUTS, BEAT_GETS = 3, 1
"""Requests each interval: lease, telemetry and a list (priced as a put); a look for commands."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A group and the world it runs in.

    ``step_s`` and ``tokens_per_step`` are one replica's, ``mtbf_s`` too (inf: it never fails);
    ``replace_s`` is the time from its death until its successor starts. Bandwidths are one
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
    egress_per_gb: float = 0.09
    put_per_million: float = 5.0
    get_per_million: float = 0.4
    replica_per_hour: float = 0.0
    syncer_per_hour: float = 0.0

    def __post_init__(self) -> None:
        positive = {"parameters", "step_s", "up_bytes_per_s", "down_bytes_per_s", "mtbf_s"}
        for name in [field.name for field in fields(self)][1:]:
            value = getattr(self, name)
            endless = name == "mtbf_s" and value == math.inf
            if not (math.isfinite(value) or endless):
                raise SettingsError(name, f"expected a finite number, found {value}")
            if value < 0 or (name in positive and value == 0):
                least = "more than 0" if name in positive else "0 or more"
                raise SettingsError(name, f"expected {least}, found {plain(value)}")
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
        return self.settings.round_steps * self.step_s

    @property
    def covered_s(self) -> float:
        """Of an exchange, what overlap can hide."""
        return self.settings.overlap_steps * self.step_s


@dataclass(frozen=True, kw_only=True)
class Cost:
    hardware: float
    egress: float
    requests: float

    @property
    def total(self) -> float:
        return self.hardware + self.egress + self.requests


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Times are of one round. ``efficiency`` is goodput times utilisation: the share of N replicas'
    time whose work ends up in the global weights. ``up`` to ``gets`` are of the whole run and
    everybody. ``round_cost`` is the exchange's egress and requests alone."""

    traffic: Traffic
    compute_s: float
    exchange_s: float
    exposed_s: float
    utilisation: float
    outlook: Outlook
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


def predict(scenario: Scenario) -> Prediction:
    """The whole run, with the reduce plan that the settings name."""
    settings = scenario.settings
    traffic = round_traffic(settings, scenario.parameters, mode=scenario.mode)
    transfer_s, latency_s = exchange_times(scenario, traffic)
    exchange_s, compute_s = transfer_s + latency_s, scenario.compute_s
    exposed_s = max(0.0, exchange_s - scenario.covered_s, transfer_s - compute_s)
    checkpoint_bytes = CHECKPOINT_BYTES * scenario.parameters
    outlook = look_ahead(
        settings,
        mtbf_s=scenario.mtbf_s,
        away_s=scenario.replace_s + checkpoint_bytes / scenario.down_bytes_per_s,
        step_s=scenario.step_s,
    )
    rounds = rounds_of(settings, scenario.tokens_per_step)
    wall_s = rounds * (compute_s + exposed_s) * outlook.slowdown
    failures = outlook.failures_per_s * wall_s if outlook.failures_per_s else 0.0
    # Full rounds, of the same traffic as all rounds together.
    full = rounds * outlook.live_share
    beats = wall_s * settings.num_replicas * outlook.live_share / BEAT_INTERVAL_S if full else 0.0
    puts, gets = full * traffic.puts + beats * BEAT_PUTS, full * traffic.gets + beats * BEAT_GETS
    steps = full * outlook.kept_share * settings.num_replicas * settings.round_steps
    catch_up = failures * checkpoint_bytes
    return Prediction(
        traffic=traffic,
        compute_s=compute_s,
        exchange_s=exchange_s,
        exposed_s=exposed_s,
        utilisation=compute_s / (compute_s + exposed_s),
        outlook=outlook,
        efficiency=outlook.goodput * compute_s / (compute_s + exposed_s),
        rounds=rounds,
        wall_s=wall_s,
        tokens=steps * scenario.tokens_per_step,
        failures=failures,
        up=full * traffic.up,
        down=full * traffic.down + catch_up,
        puts=puts,
        gets=gets,
        round_cost=_egress(scenario, traffic.egress)
        + _requests(scenario, traffic.puts, traffic.gets),
        cost=Cost(
            hardware=_hardware(scenario, wall_s),
            egress=_egress(scenario, full * traffic.egress + catch_up),
            requests=_requests(scenario, puts, gets),
        ),
    )


def predict_modes(scenario: Scenario) -> dict[str, Prediction]:
    """The same run with each reduce plan it could use."""
    return {
        mode: predict(
            dataclasses.replace(
                scenario, settings=dataclasses.replace(scenario.settings, reduce_plan=mode)
            )
        )
        for mode in modes(scenario.settings)
    }


def rounds_of(settings: GroupSettings, tokens_per_step: int) -> int:
    """Rounds until the run ends: with a token limit, the one in which it is reached."""
    tokens_per_round = settings.round_steps * tokens_per_step * settings.num_replicas
    if not settings.max_tokens or not tokens_per_round:
        return settings.total_rounds
    return min(settings.total_rounds, -(-settings.max_tokens // tokens_per_round))


def exchange_times(scenario: Scenario, traffic: Traffic) -> tuple[float, float]:
    """Seconds of one exchange: transfers, and waiting for first bytes."""
    replica, syncer = traffic.replica, traffic.syncer
    transfer_s = _transfer_s(scenario, replica) + _transfer_s(scenario, syncer) / SYNCER_SPEED
    trips = replica.round_trips + syncer.round_trips / SYNCER_SPEED
    return transfer_s, trips * scenario.latency_s


def bandwidth_for(scenario: Scenario, utilisation: float) -> float:
    """Bytes per second, as much up as down, from which on a plan reaches ``utilisation``; inf where
    latencies alone forbid it."""
    traffic = round_traffic(scenario.settings, scenario.parameters, mode=scenario.mode)
    alike = dataclasses.replace(scenario, up_bytes_per_s=1.0, down_bytes_per_s=1.0)
    moved, latency_s = exchange_times(alike, traffic)
    return needed_bytes_per_s(
        moved=moved,
        compute_s=scenario.compute_s,
        covered_s=scenario.covered_s,
        latency_s=latency_s,
        utilisation=utilisation,
    )


def needed_bytes_per_s(
    *, moved: float, compute_s: float, covered_s: float, latency_s: float, utilisation: float
) -> float:
    """The formula of utilisation, solved for the bandwidth that moves ``moved`` bytes."""
    allowed_s = compute_s * (1 / utilisation - 1)
    transfer_s = min(allowed_s + covered_s - latency_s, allowed_s + compute_s)
    return moved / transfer_s if transfer_s > 0 else math.inf


def _transfer_s(scenario: Scenario, cost: RoundCost) -> float:
    return cost.up / scenario.up_bytes_per_s + cost.down / scenario.down_bytes_per_s


def _hardware(scenario: Scenario, wall_s: float) -> float:
    per_hour = scenario.settings.num_replicas * scenario.replica_per_hour
    if scenario.mode == SYNCER:
        per_hour += scenario.syncer_per_hour
    return per_hour * wall_s / 3600 if per_hour else 0.0


def _egress(scenario: Scenario, size_bytes: float) -> float:
    return size_bytes / 1e9 * scenario.egress_per_gb


def _requests(scenario: Scenario, puts: float, gets: float) -> float:
    return puts / 1e6 * scenario.put_per_million + gets / 1e6 * scenario.get_per_million
