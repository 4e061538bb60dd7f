"""``python -m diloco.simulate`` and ``diloco.simulate(request)``: predict the speed and cost of a
run before it is started.

    python -m diloco.simulate --parameters 1B --num-replicas 8 --sync-every 500 --codec bf16 \\
        --step-s 1 --tokens-per-step 500k --mtbf-hours 24 --replace-s 120 --replica-per-hour 2

The formulas are in :mod:`diloco.planner.prediction` and :mod:`diloco.planner.availability`;
``docs/planning.md`` compares them with published tables. Options for group settings have the same
names and bounds as in ``python -m diloco.init``, and ``--settings`` reads the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.callable_module import CallableModule
from diloco.command_line import add_common_options, finite_json
from diloco.error_lines import print_error
from diloco.inspection.tables import columns, size
from diloco.planner.prediction import (
    PlanEstimate,
    PlanRequest,
    bandwidth_for,
    predict,
    predict_modes,
)
from diloco.protocol.setting_spec import SettingsError
from diloco.protocol.settings import GroupSettings, setting_fields

SETTINGS = (
    "num_replicas",
    "sync_every",
    "num_fragments",
    "overlap_steps",
    "codec",
    "topk",
    "mean_codec",
    "reduce_plan",
    "total_rounds",
    "max_tokens",
    "min_quorum",
    "grace_s",
    "heartbeat_timeout_s",
    "late_keep",
)
"""Group settings that the prediction depends on."""
UTILISATIONS = (0.9, 0.95, 0.99)

_FLAGS = {
    "up_bytes_per_s": "up_mbit_s",
    "down_bytes_per_s": "down_mbit_s",
    "mtbf_s": "mtbf_hours",
}
"""Options whose names differ from the fields of a scenario."""
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The prediction of a run.

    ``estimate`` is for the reduce plan of the settings, ``reduce_plans`` for each plan that the run
    could use. ``bandwidths`` has, by utilisation from 0 to 1, the bytes per second that each
    direction of a replica's line needs for it; inf if latencies alone forbid it.
    """

    request: PlanRequest
    estimate: PlanEstimate
    reduce_plans: Mapping[str, PlanEstimate]
    bandwidths: Mapping[float, float]


def simulate(request: PlanRequest) -> Simulation:
    """Predict the utilisation, traffic, goodput, time and cost of a run.

    ``request`` has the group's settings, the model's size in parameters, the seconds of an inner
    step, the bytes per second of the lines and the prices; it raises
    :class:`~diloco.protocol.setting_spec.SettingsError` for values out of range.
    """
    return Simulation(
        request=request,
        estimate=predict(request),
        reduce_plans=predict_modes(request),
        bandwidths={share: bandwidth_for(request, share) for share in UTILISATIONS},
    )


def number(text: str) -> float:
    """Parse a number with an optional suffix k, M, B or T."""
    scale = _SCALES.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(
            f"expected a number of 0 or more such as 1e9, 500k or 1B, found {text!r}"
        )
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.simulate",
        description="Predict utilisation, bytes, goodput, time and cost of a run.",
    )
    add_common_options(parser)
    add = parser.add_argument
    add("--parameters", type=number, required=True, help="model size, e.g. 150M or 1B")
    add("--step-s", type=number, required=True, help="seconds of one inner step of one replica")
    add("--tokens-per-step", type=number, default=0, help="tokens of one inner step of one replica")
    add("--up-mbit-s", type=number, default=800, help="one replica's bandwidth to the bucket")
    add("--down-mbit-s", type=number, default=800, help="one replica's bandwidth from it")
    add("--latency-s", type=number, default=0.1, help="seconds until the first byte of a response")
    add(
        "--mtbf-hours",
        type=number,
        default=math.inf,
        help="mean hours between failures of a replica",
    )
    add("--replace-s", type=number, default=0, help="seconds until a failed replica is replaced")
    add(
        "--late-share",
        type=number,
        default=0,
        help="share of contributions that miss their round, below 1",
    )
    add("--egress-per-gb", type=number, default=0.09, help="price of reading a GB; 0 in the region")
    add("--put-per-million", type=number, default=5.0, help="price of a million PUT and LIST")
    add("--get-per-million", type=number, default=0.4, help="price of a million GET")
    add("--replica-per-hour", type=number, default=0, help="price of one replica's hardware")
    add("--syncer-per-hour", type=number, default=0, help="price of the syncer's hardware")
    add("--settings", type=Path, help="JSON file with group settings to change")
    for spec in setting_fields():
        if spec.name in SETTINGS:
            flag = f"--{spec.name.replace('_', '-')}"
            add(flag, type=str if spec.kind == "choice" else number, help=spec.help)
    add("--json", action="store_true", help="print the prediction as JSON")
    return parser


def request_of(arguments: argparse.Namespace) -> PlanRequest:
    """Raises :class:`SettingsError`, or another ValueError or OSError for the settings' file."""
    chosen: dict[str, Any] = {}
    if arguments.settings:
        chosen = json.loads(arguments.settings.read_text())
        if not isinstance(chosen, dict):
            raise SettingsError("settings", f"expected a JSON object, found {chosen!r}")
    given = {name: getattr(arguments, name) for name in SETTINGS}
    chosen |= {name: value for name, value in given.items() if value is not None}
    # Neither changes the prediction, and their defaults would be invalid for a short run.
    unimportant = {"warmup_steps": 0, "max_replicas": 99_999}
    for name in ("parameters", "tokens_per_step"):
        if getattr(arguments, name) % 1:
            raise SettingsError(name, f"expected a whole number, found {getattr(arguments, name)}")
    return PlanRequest(
        settings=GroupSettings.from_dict(GroupSettings().to_dict() | unimportant | chosen),
        parameters=int(arguments.parameters),
        step_s=arguments.step_s,
        tokens_per_step=int(arguments.tokens_per_step),
        up_bytes_per_s=arguments.up_mbit_s * 1e6 / 8,
        down_bytes_per_s=arguments.down_mbit_s * 1e6 / 8,
        latency_s=arguments.latency_s,
        mtbf_s=arguments.mtbf_hours * 3600,
        replace_s=arguments.replace_s,
        late_share=arguments.late_share,
        egress_per_gb=arguments.egress_per_gb,
        put_per_million=arguments.put_per_million,
        get_per_million=arguments.get_per_million,
        replica_per_hour=arguments.replica_per_hour,
        syncer_per_hour=arguments.syncer_per_hour,
    )


def document(simulation: Simulation) -> dict[str, Any]:
    """Return the output of ``--json``. Infinite numbers (no end, no failures) are null."""
    request = simulation.request
    scenario = dataclasses.asdict(request) | {"settings": request.settings.to_dict()}
    return {
        "scenario": finite_json(scenario),
        "prediction": finite_json(_prediction(simulation.estimate)),
        "reduce_plans": {
            mode: finite_json(_prediction(estimate))
            for mode, estimate in simulation.reduce_plans.items()
        },
        "bytes_per_s_for_utilisation": finite_json(
            {str(share): rate for share, rate in simulation.bandwidths.items()}
        ),
    }


def _prediction(estimate: PlanEstimate) -> dict[str, Any]:
    body = dataclasses.asdict(estimate)
    body["outlook"] |= {"goodput": estimate.outlook.goodput, "slowdown": estimate.outlook.slowdown}
    body["cost"]["total"] = estimate.cost.total
    return body | {"tokens_per_s": estimate.tokens_per_s}


# -- text ------------------------------------------------------------------------------------------


def report(simulation: Simulation) -> str:
    request, result = simulation.request, simulation.estimate
    settings = request.settings
    plan = result.traffic.mode + (" (auto)" if settings.reduce_plan == "auto" else "")
    bandwidths = ", ".join(
        f"{share:.0%} needs {_rate(rate)}" for share, rate in simulation.bandwidths.items()
    )
    outlook, each = result.outlook, result.traffic.replica
    rows = [
        (
            "plan",
            f"{settings.num_replicas} replicas, {request.parameters:,} parameters, "
            f"{settings.codec}, {plan}, H {settings.sync_every}, P {settings.num_fragments}, "
            f"tau {settings.overlap_steps}",
        ),
        (
            "round",
            f"{settings.round_steps} steps, {_time(result.compute_s)}; "
            f"exchange {_time(result.exchange_s)}, of which {_time(result.exposed_s)} exposed",
        ),
        ("utilisation", f"{result.utilisation:.1%}; {bandwidths}"),
        (
            "each replica",
            f"up {size(each.up)}, down {size(each.down)}, "
            f"{each.puts + each.gets:,} requests a round",
        ),
        (
            "goodput",
            f"{outlook.goodput:.1%}: replicas available {outlook.availability:.2%}, "
            f"quorum {outlook.quorum_share:.2%}, work kept {outlook.kept_share:.2%}, "
            f"{_time(outlook.stall_s)} stall per failure",
        ),
        ("efficiency", f"{result.efficiency:.1%} (utilisation x goodput)"),
        (
            "run",
            f"{result.rounds:,} rounds, {_time(result.wall_s)}, {result.failures:,.1f} failures"
            + (f", {result.tokens:.4g} tokens" if request.tokens_per_step else ""),
        ),
        (
            "all replicas",
            f"up {size(result.up)}, down {size(result.down)}, "
            f"{result.puts:,.0f} PUT and LIST, {result.gets:,.0f} GET",
        ),
        (
            "cost",
            f"{result.cost.total:,.2f}: hardware {result.cost.hardware:,.2f}, "
            f"egress {result.cost.egress:,.2f}, requests {result.cost.requests:,.2f}",
        ),
    ]
    lines = [f"{name:<12}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *_table(simulation)]) + "\n"


def _table(simulation: Simulation) -> list[str]:
    chosen = simulation.estimate.traffic.mode
    rows = [
        ("reduce plan", "up", "down", "requests", "exchange", "utilisation", "per round", "total"),
        *(
            (
                ("* " if mode == chosen else "  ") + mode,
                size(result.traffic.replica.up),
                size(result.traffic.replica.down),
                f"{result.traffic.replica.puts + result.traffic.replica.gets:,}",
                _time(result.exchange_s),
                f"{result.utilisation:.1%}",
                f"{result.round_cost:,.2f}",
                f"{result.cost.total:,.2f}",
            )
            for mode, result in simulation.reduce_plans.items()
        ),
    ]
    return columns(rows)


def _rate(bytes_per_s: float) -> str:
    return "lower latency" if bytes_per_s == math.inf else f"{bytes_per_s * 8 / 1e6:,.4g} Mbit/s"


def _time(seconds: float) -> str:
    if seconds == math.inf:
        return "forever"
    for unit, scale in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.3g} s"


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        simulation = simulate(request_of(arguments))
    except SettingsError as error:
        flag = _FLAGS.get(error.field, error.field).replace("_", "-")
        print_error(error, message=f"--{flag}: {error.message}", verbose=arguments.verbose)
        return 2
    except (ValueError, OSError) as error:
        print_error(error, message=f"--settings: {error}", verbose=arguments.verbose)
        return 2
    if arguments.json:
        print(json.dumps(document(simulation), indent=2, allow_nan=False))
    else:
        print(report(simulation), end="")
    return 0


sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    sys.exit(main())
