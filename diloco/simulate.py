"""``python -m diloco.simulate``: what a plan will reach and cost, before anything is started.

    python -m diloco.simulate --parameters 1B --num-replicas 8 --sync-every 500 --codec bf16 \\
        --step-s 1 --tokens-per-step 500k --mtbf-hours 24 --replace-s 120 --replica-per-hour 2

The formulas are in :mod:`diloco.planner.prediction` and :mod:`diloco.planner.availability`; how
they compare with published tables is in ``docs/planning.md``. Options that are group settings have
the names and bounds they have in ``python -m diloco.init``; ``--settings`` reads the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from diloco.inspection.tables import columns, size
from diloco.planner.prediction import (
    Prediction,
    Scenario,
    bandwidth_for,
    predict,
    predict_modes,
)
from diloco.protocol.setting_spec import SettingsError
from diloco.protocol.settings import GroupSettings, setting_fields
from diloco.versions import add_version

SETTINGS = (
    "num_replicas", "sync_every", "num_fragments", "overlap_steps", "codec", "topk", "reduce_plan",
    "total_rounds", "max_tokens", "min_quorum", "grace_s", "heartbeat_timeout_s",
)  # fmt: skip
"""Group settings that the prediction depends on."""
UTILISATIONS = (0.9, 0.95, 0.99)

_FLAGS = {
    "up_bytes_per_s": "up_mbit_s",
    "down_bytes_per_s": "down_mbit_s",
    "mtbf_s": "mtbf_hours",
}
"""Where an option is not called as its field."""
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def number(text: str) -> float:
    """A number, perhaps with k, M, B or T behind it."""
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
        description="Predict utilisation, bytes, goodput, time and cost of a plan.",
    )
    add_version(parser)
    add = parser.add_argument
    add("--parameters", type=number, required=True, help="of the model, e.g. 150M or 1B")
    add("--step-s", type=number, required=True, help="seconds of one inner step of one replica")
    add("--tokens-per-step", type=number, default=0, help="tokens of one inner step of one replica")
    add("--up-mbit-s", type=number, default=800, help="one replica's bandwidth to the bucket")
    add("--down-mbit-s", type=number, default=800, help="one replica's bandwidth from it")
    add("--latency-s", type=number, default=0.1, help="until a request's first byte")
    add("--mtbf-hours", type=number, default=math.inf, help="hours until one replica fails")
    add("--replace-s", type=number, default=0, help="from its death until its successor starts")
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


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    """Raises :class:`SettingsError`, or another ValueError or OSError for the settings' file."""
    chosen: dict[str, Any] = {}
    if arguments.settings:
        chosen = json.loads(arguments.settings.read_text())
        if not isinstance(chosen, dict):
            raise SettingsError("settings", f"expected a JSON object, found {chosen!r}")
    given = {name: getattr(arguments, name) for name in SETTINGS}
    chosen |= {name: value for name, value in given.items() if value is not None}
    # Neither changes the prediction, and a short plan must not stumble over their defaults.
    unimportant = {"warmup_steps": 0, "max_replicas": 99_999}
    for name in ("parameters", "tokens_per_step"):
        if getattr(arguments, name) % 1:
            raise SettingsError(name, f"expected a whole number, found {getattr(arguments, name)}")
    return Scenario(
        settings=GroupSettings.from_dict(GroupSettings().to_dict() | unimportant | chosen),
        parameters=int(arguments.parameters),
        step_s=arguments.step_s,
        tokens_per_step=int(arguments.tokens_per_step),
        up_bytes_per_s=arguments.up_mbit_s * 1e6 / 8,
        down_bytes_per_s=arguments.down_mbit_s * 1e6 / 8,
        latency_s=arguments.latency_s,
        mtbf_s=arguments.mtbf_hours * 3600,
        replace_s=arguments.replace_s,
        egress_per_gb=arguments.egress_per_gb,
        put_per_million=arguments.put_per_million,
        get_per_million=arguments.get_per_million,
        replica_per_hour=arguments.replica_per_hour,
        syncer_per_hour=arguments.syncer_per_hour,
    )


def document(scenario: Scenario) -> dict[str, Any]:
    """What ``--json`` prints. Infinite numbers (it never ends, it never fails) are null."""
    world = dataclasses.asdict(scenario) | {"settings": scenario.settings.to_dict()}
    return {
        "scenario": _finite(world),
        "prediction": _finite(_prediction(predict(scenario))),
        "reduce_plans": {
            mode: _finite(_prediction(found)) for mode, found in predict_modes(scenario).items()
        },
        "bytes_per_s_for_utilisation": _finite(
            {str(share): bandwidth_for(scenario, share) for share in UTILISATIONS}
        ),
    }


def _prediction(found: Prediction) -> dict[str, Any]:
    body = dataclasses.asdict(found)
    body["outlook"] |= {"goodput": found.outlook.goodput, "slowdown": found.outlook.slowdown}
    body["cost"]["total"] = found.cost.total
    return body | {"tokens_per_s": found.tokens_per_s}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- text ------------------------------------------------------------------------------------------


def report(scenario: Scenario) -> str:
    found, settings = predict(scenario), scenario.settings
    plan = found.traffic.mode + (" (auto)" if settings.reduce_plan == "auto" else "")
    bandwidths = ", ".join(
        f"{share:.0%} needs {_rate(bandwidth_for(scenario, share))}" for share in UTILISATIONS
    )
    outlook, each = found.outlook, found.traffic.replica
    rows = [
        (
            "plan",
            f"{settings.num_replicas} replicas, {scenario.parameters:,} parameters, "
            f"{settings.codec}, {plan}, H {settings.sync_every}, P {settings.num_fragments}, "
            f"tau {settings.overlap_steps}",
        ),
        (
            "round",
            f"{settings.round_steps} steps, {_time(found.compute_s)}; "
            f"exchange {_time(found.exchange_s)}, of which {_time(found.exposed_s)} show",
        ),
        ("utilisation", f"{found.utilisation:.1%}; {bandwidths}"),
        (
            "each replica",
            f"up {size(each.up)}, down {size(each.down)}, "
            f"{each.puts + each.gets:,} requests a round",
        ),
        (
            "goodput",
            f"{outlook.goodput:.1%}: replicas there {outlook.availability:.2%}, "
            f"quorum {outlook.quorum_share:.2%}, work kept {outlook.kept_share:.2%}, "
            f"{_time(outlook.stall_s)} of waiting a failure",
        ),
        ("efficiency", f"{found.efficiency:.1%} (utilisation x goodput)"),
        (
            "run",
            f"{found.rounds:,} rounds, {_time(found.wall_s)}, {found.failures:,.1f} failures"
            + (f", {found.tokens:.4g} tokens" if scenario.tokens_per_step else ""),
        ),
        (
            "everybody",
            f"up {size(found.up)}, down {size(found.down)}, "
            f"{found.puts:,.0f} PUT and LIST, {found.gets:,.0f} GET",
        ),
        (
            "cost",
            f"{found.cost.total:,.2f}: hardware {found.cost.hardware:,.2f}, "
            f"egress {found.cost.egress:,.2f}, requests {found.cost.requests:,.2f}",
        ),
    ]
    lines = [f"{name:<12}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *_table(scenario, found.traffic.mode)]) + "\n"


def _table(scenario: Scenario, chosen: str) -> list[str]:
    rows = [
        ("reduce plan", "up", "down", "requests", "exchange", "utilisation", "a round", "in all"),
        *(
            (
                ("* " if mode == chosen else "  ") + mode,
                size(found.traffic.replica.up),
                size(found.traffic.replica.down),
                f"{found.traffic.replica.puts + found.traffic.replica.gets:,}",
                _time(found.exchange_s),
                f"{found.utilisation:.1%}",
                f"{found.round_cost:,.2f}",
                f"{found.cost.total:,.2f}",
            )
            for mode, found in predict_modes(scenario).items()
        ),
    ]
    return columns(rows)


def _rate(bytes_per_s: float) -> str:
    return "less latency" if bytes_per_s == math.inf else f"{bytes_per_s * 8 / 1e6:,.4g} Mbit/s"


def _time(seconds: float) -> str:
    if seconds == math.inf:
        return "for ever"
    for unit, scale in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.3g} s"


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        scenario = scenario_of(arguments)
    except SettingsError as error:
        flag = _FLAGS.get(error.field, error.field).replace("_", "-")
        print(f"error: --{flag}: {error.message}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: --settings: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(document(scenario), indent=2, allow_nan=False))
    else:
        print(report(scenario), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
