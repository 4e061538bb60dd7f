"""Control requests of a group per replica and round, by purpose, under virtual time.

The library's own replicas train a tiny model over a counting store in memory
(:mod:`bench.support.control_traffic`). Two kinds of requests are listed apart:

- *exchange*: leases, listings, records, plan and commit. They depend on the replicas and on how
  long a round waits, and not on the length of its computation.
- *timed*: heartbeats, commands, the check for a newer process and telemetry, by the clock.

The price is compared with the requests of the data of 1B parameters as bf16 (sharded plan), by the
formulas that ``bench/plan_traffic.py`` proves.

The requests depend on the order in which the replicas end their steps. Each seed is another order.

Usage: python bench/control_traffic.py [--replicas 2 8 32 64 128] [--round-s 60]
       [--heartbeat-timeout-s 15] [--rounds 3] [--seeds 1] [--only-straggler]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.support.control_traffic import TIMED, Case, Measured, measure
from diloco.planner.traffic import round_traffic
from diloco.protocol.settings import GroupSettings

PUT_PRICE, GET_PRICE = 5.0e-6, 0.4e-6
"""Dollars of a PUT or LIST, and of a GET, by the list price of S3."""
PARAMETERS = 1_000_000_000


def data_price(replicas: int) -> float:
    """Dollars of the data's requests per replica and round."""
    settings = GroupSettings(num_replicas=replicas, codec="bf16", max_replicas=max(64, replicas))
    traffic = round_traffic(settings, PARAMETERS, mode="sharded")
    return (traffic.puts * PUT_PRICE + traffic.gets * GET_PRICE) / replicas


def price(measured: Measured) -> float:
    """Dollars of the control requests per replica and round."""
    return sum(
        count * (GET_PRICE if verb == "GET" else PUT_PRICE)
        for (_, verb), count in measured.requests.items()
    )


def print_case(case: Case, measured: Measured) -> None:
    who = f"{case.replicas}{' and a straggler' if case.straggler else ''}"
    exchange, timed = measured.exchange, measured.of(*TIMED)
    share = price(measured) / data_price(case.replicas)
    print(
        f"| {who} | {measured.seconds:.1f} | {exchange:.1f} | {timed:.1f} | {100 * share:.1f} % "
        f"| {measured.log_bytes / case.replicas:,.0f} |",
        flush=True,
    )


def print_kinds(case: Case, measured: Measured) -> None:
    print(f"\n{case.replicas} replicas{', one of them slow' if case.straggler else ''}:\n")
    print("| purpose | PUT | GET | LIST |\n| --- | ---: | ---: | ---: |")
    for kind in dict.fromkeys(kind for kind, _ in sorted(measured.requests)):
        counts = [measured.requests.get((kind, verb), 0.0) for verb in ("PUT", "GET", "LIST")]
        print(f"| {kind} | " + " | ".join(f"{count:.2f}" for count in counts) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 32, 64, 128])
    parser.add_argument("--round-s", type=float, default=60.0, help="computation of a round")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--only-straggler", action="store_true", help="leave out the calm cases")
    given = parser.parse_args()
    found = []
    print("Per replica and round:\n")
    print("| replicas | seconds | exchange | timed | price / data's | log, bytes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for replicas in given.replicas:
        for straggler in (True,) if given.only_straggler else (False, True):
            for seed in range(given.seeds):
                case = Case(
                    replicas=replicas,
                    straggler=straggler,
                    round_s=given.round_s,
                    heartbeat_timeout_s=given.heartbeat_timeout_s,
                    rounds=given.rounds,
                    seed=seed,
                )
                found.append((case, measure(case)))
                print_case(*found[-1])
    for case, measured in found[-2:]:
        print_kinds(case, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
