"""What ``python -m diloco.simulate`` predicts, beside what papers have published.

Prints each published number, ours, and by how much we miss. Nothing in the model is fitted to these
tables but the pauses of a learner; ``docs/planning.md`` explains the deviations. The assumptions
that the papers leave to us are the constants below.

Usage: python bench/simulate_papers.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco.inspection.tables import columns
from diloco.planner.availability import availability
from diloco.planner.prediction import PlanRequest, bandwidth_for, needed_bytes_per_s, predict_modes
from diloco.protocol.payload_size import payload_bytes
from diloco.protocol.settings import GroupSettings

Rows = list[tuple[str, ...]]

# -- Streaming DiLoCo, arXiv:2501.18512 ------------------------------------------------------------

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
GBIT_S = {
    "data parallel": (104.8, 222, 222, 268, 472),
    "DiLoCo": (1.7, 7.5, 16, 33.9, 104.8),
    "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
    "streaming, overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
    "streaming, overlap, 4 bit": (0.4, 0.9, 1.4, 1.4, 1.7),
}
"""Needed for each utilisation, with 10B parameters and steps of 0.8 s."""
PARAMETERS, STEP_S = 10**10, 0.8
STEPS, FRAGMENTS, OVERLAP = 100, 20, 1
"""H, P and tau are ours: H = 100, a fragment every five steps, exchanged during one step."""
PLANS = {
    "data parallel": {"sync_every": 1},
    "DiLoCo": {"sync_every": STEPS},
    "streaming": {"sync_every": STEPS, "num_fragments": FRAGMENTS},
    "streaming, overlap": {
        "sync_every": STEPS,
        "num_fragments": FRAGMENTS,
        "overlap_steps": OVERLAP,
    },
    "streaming, overlap, 4 bit": {
        "sync_every": STEPS,
        "num_fragments": FRAGMENTS,
        "overlap_steps": OVERLAP,
        "codec": "e3m0",
    },
}
BACKWARD = 2 / 3
"""Of a step, by floating-point operations. The authors let reductions run under it
(arthurdouillard.com/diloco); an exchange through a store has nothing to upload before it ends."""


def streaming() -> tuple[str, Rows]:
    rows: Rows = [("Gbit/s for utilisation", *(f"{share:.0%}" for share in UTILISATIONS))]
    models: dict[str, Callable[[GroupSettings, float], float]] = {
        "all-reduce": lambda settings, share: _all_reduce(settings, share, hidden_steps=0),
        "all-reduce under backward": lambda settings, share: _all_reduce(
            settings, share, hidden_steps=BACKWARD
        ),
        "store": _store,
    }
    for name, published in GBIT_S.items():
        rows.append((name, *(f"{value:g}" for value in published)))
        settings = GroupSettings(
            **{"codec": "bf16", "num_replicas": 2, "warmup_steps": 0, "reduce_plan": "gather"}
            | PLANS[name]
        )
        for title, model in models.items():
            ours = [model(settings, share) for share in UTILISATIONS]
            rows.append((f"  {title}", *map(_beside, ours, published)))
    return f"10B parameters, {STEP_S} s steps (arXiv:2501.18512)", rows


def _all_reduce(settings: GroupSettings, share: float, *, hidden_steps: float) -> float:
    """Two sites that sum in the network: each sends and receives a fragment once, at once."""
    fragment = PARAMETERS // settings.num_fragments
    return (
        needed_bytes_per_s(
            moved=payload_bytes(fragment, settings.codec),
            compute_s=settings.round_steps * STEP_S,
            covered_s=(settings.overlap_steps + hidden_steps) * STEP_S,
            latency_s=0.0,
            utilisation=share,
        )
        * 8e-9
    )


def _store(settings: GroupSettings, share: float) -> float:
    """Two replicas and a bucket: up, and only then down."""
    request = PlanRequest(settings=settings, parameters=PARAMETERS, step_s=STEP_S, latency_s=0.0)
    return bandwidth_for(request, share) * 8e-9


# -- Decoupled DiLoCo, arXiv:2604.21428 ------------------------------------------------------------

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
GOODPUT = {
    1: (88, 80, 69, 58, 40),
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
"""Percent, simulated by the authors, by the number of learners (1: elastic data parallel), with
one failure per chip and year."""
YEAR_S = 365.25 * 86_400
AWAY_S = 22.7
"""The cost of a failure to a learner, in one number: fitted to this table, not by us."""
DOWNSCALE_S, UPSCALE_S = 9.5, 18.6
"""How long a failure stops an elastic learner, and how long the return of its chips does. The paper
has both pauses; their length is fitted here, once for the whole table."""


def elastic_goodput(mtbf_s: float) -> float:
    """Return the goodput of a learner that pauses when chips fail and again when they return.

    Nothing fails during a pause, and chips that return during one need no further one: with a
    goodput g, ``g / mtbf`` failures per second cost a downscale each, and the share g of their
    returns an upscale: ``1 - g = g / mtbf * (downscale + g * upscale)``.
    """
    linear = DOWNSCALE_S + mtbf_s
    return (math.sqrt(linear**2 + 4 * UPSCALE_S * mtbf_s) - linear) / (2 * UPSCALE_S)


def goodput() -> tuple[str, Rows]:
    rows: Rows = [("goodput, chips", *(f"{chips:,}" for chips in CHIPS))]
    models: dict[str, Callable[[float], float]] = {
        "one pause": lambda mtbf_s: availability(mtbf_s, AWAY_S),
        "two pauses": elastic_goodput,
    }
    for learners, published in GOODPUT.items():
        rows.append((f"M = {learners}", *(f"{value}" for value in published)))
        for title, model in models.items():
            ours = [100 * model(learners * YEAR_S / chips) for chips in CHIPS]
            misses = zip(ours, published, strict=True)
            rows.append((f"  {title}", *(f"{o:.1f} ({o - value:+.1f})" for o, value in misses)))
    least, most = away_bounds(3.0)
    title = f"percent; one pause: {AWAY_S} s, two: {DOWNSCALE_S} s and {UPSCALE_S} s"
    return (
        f"{title} (arXiv:2604.21428)\n3 points need D >= {least:.1f} s and D <= {most:.1f} s",
        rows,
    )


def away_bounds(points: float) -> tuple[float, float]:
    """Return the smallest and the largest D with which the formula with one pause is within
    ``points`` of all published values; the first is larger than the second if there is none."""
    lowest, highest = 0.0, math.inf
    for learners, published in GOODPUT.items():
        for chips, value in zip(CHIPS, published, strict=True):
            mtbf_s = learners * YEAR_S / chips
            lowest = max(lowest, _away_s(mtbf_s, value + points))
            highest = min(highest, _away_s(mtbf_s, value - points))
    return lowest, highest


def _away_s(mtbf_s: float, percent: float) -> float:
    return mtbf_s * (100 / percent - 1)


# -- Single numbers --------------------------------------------------------------------------------

EGRESS = {"gather": (10.0, 160.0), "sharded": (2.5, 58.0), "syncer": (1.4, 42.0)}
"""Dollars and seconds of one round of 1B parameters in bf16, 8 replicas outside the bucket's
region, $0.09 per GB, 100 MB/s."""


def egress() -> tuple[str, Rows]:
    request = PlanRequest(
        settings=GroupSettings(codec="bf16", num_replicas=8),
        parameters=10**9,
        step_s=1.0,
        latency_s=0.0,
    )
    rows: Rows = [("reduce plan", "$", "ours", "seconds", "ours")]
    for mode, found in predict_modes(request).items():
        dollars, seconds = EGRESS[mode]
        rows.append(
            (
                mode,
                f"{dollars:g}",
                _beside(found.round_cost, dollars),
                f"{seconds:g}",
                _beside(found.exchange_s, seconds),
            )
        )
    return "one round of 1B parameters in bf16, 8 replicas, worked by hand", rows


def single() -> tuple[str, Rows]:
    compression = 4 * 4096 * 1000 / payload_bytes(4096 * 1000, "topk", topk=64)
    return "single numbers", [
        ("", "published", "ours"),
        (
            "utilisation %, 70 s of exchange in 20 min of compute (arXiv:2603.08163)",
            "94.5",
            _beside(100 * 1200 / 1270, 94.5),
        ),
        (
            "times smaller than fp32, top 64 of 4096 (arXiv:2508.15706)",
            "146",
            _beside(compression, 146),
        ),
    ]


def _beside(ours: float, published: float) -> str:
    return f"{ours:.3g} ({ours / published - 1:+.0%})"


def main() -> int:
    for title, rows in (streaming(), goodput(), egress(), single()):
        print(title)
        print("\n".join(columns(rows)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
