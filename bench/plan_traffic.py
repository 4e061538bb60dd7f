"""Bytes and requests of a round, process by process, held against the formulas.

Every round is really exchanged over a folder, with a store that counts by what a key is for. Of
payloads, their records and reduced shards (the data) requests and bytes must equal
:func:`~diloco.protocol.reduce_cost.round_cost`, ``read_back_cost`` and
``syncer_cost`` exactly; the script ends with status 1 where they do not. Control (plan, commit,
leases, and polling for them) follows the clock: it is listed apart.

Blocks and parts are made small, so that even these fragments are of many parts. With a low-bit mean
the second round is counted, which reads what the first one cut off.

Usage: python bench/plan_traffic.py [--replicas 2 3 .. 16] [--numel N ...] [--codec C ...]
       [--plan P ...] [--mean-codec M]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support.cuts import small_cuts
from bench.support.exchanging import SYNCER_NUMBER, BareMember, bare_settings, in_threads
from bench.support.recording import DATA_KINDS, RecordingStore, Traffic
from diloco.exchange.upload import bytes_to_verify
from diloco.protocol.payload_size import FULL_MEAN
from diloco.protocol.reduce_cost import RoundCost, read_back_cost, round_cost, syncer_cost
from diloco.store.base import LocalStore

PLANS = ("gather", "sharded", "syncer")
CODECS = ("fp32", "bf16", "int8", "e3m0", "topk")
FEW_CODECS = ("fp32", "int8")
MEANS = (FULL_MEAN, "int8", "e3m0")
NUMELS = (1, 100_003, 650_000)


def one_round(
    root: Path, *, replicas: int, plan: str, codec: str, numel: int, mean_codec: str = FULL_MEAN
) -> dict[int, dict[str, Traffic]]:
    """Return the traffic of each process in the counted round, by number and kind."""
    settings = bare_settings(replicas=replicas, plan=plan, codec=codec, mean_codec=mean_codec)
    sizes = [numel // 3, numel - numel // 3] if numel > 1 else [numel]
    numbers = [*range(replicas), *([SYNCER_NUMBER] if plan == "syncer" else [])]
    stores = {number: RecordingStore(LocalStore(root)) for number in numbers}
    members = [BareMember(store, number, settings, sizes) for number, store in stores.items()]
    for member in members:
        member.put_lease()

    def work(member: BareMember, round: int) -> None:
        seed = torch.Generator().manual_seed(member.identity.replica)
        vector = None if member.is_syncer else torch.randn(numel, generator=seed)
        settled, _ = member.round(round, vector)
        assert settled.plan.mode == plan and not settled.commit.void, settled

    for round in range(1, counted_round(mean_codec) + 1):
        for store in stores.values():
            store.traffic.clear()
        in_threads([partial(work, member, round) for member in members])
    return {number: store.traffic for number, store in stores.items()}


def counted_round(mean_codec: str) -> int:
    return 1 if mean_codec == FULL_MEAN else 2


def formula(
    number: int, *, replicas: int, plan: str, codec: str, numel: int, mean_codec: str = FULL_MEAN
) -> RoundCost:
    if number == SYNCER_NUMBER:
        return syncer_cost(numel=numel, codec=codec, replicas=replicas, mean_codec=mean_codec)
    cost = round_cost(
        numel=numel,
        codec=codec,
        replicas=replicas,
        mode=plan,
        rank=number,
        mean_codec=mean_codec,
    )
    back = read_back_cost(
        numel=numel,
        codec=codec,
        round=counted_round(mean_codec),
        verify_bytes=bytes_to_verify(),
    )
    return replace(cost, down=cost.down + back.down, gets=cost.gets + back.gets)


def data_of(traffic: dict[str, Traffic]) -> Traffic:
    """Of payloads and shards, and the record that names a payload (one request; its bytes are
    control)."""
    kinds = [traffic.get(kind, Traffic()) for kind in DATA_KINDS]
    total = Traffic(puts=traffic.get("record", Traffic()).puts)
    for kind in kinds:
        total.puts, total.gets = total.puts + kind.puts, total.gets + kind.gets
        total.up, total.down = total.up + kind.up, total.down + kind.down
    return total


def differences(found: dict[int, dict[str, Traffic]], **round: object) -> list[str]:
    """Where the counts are not the formula's."""
    wrong = []
    for number, traffic in found.items():
        data, expected = data_of(traffic), formula(number, **round)  # type: ignore[arg-type]
        for name in ("up", "down", "puts", "gets"):
            wanted, counted = getattr(expected, name), getattr(data, name)
            if counted != wanted:
                where = f"replica {number} of {round}"
                wrong += [f"expected {name} {wanted} of {where}, found {counted}"]
    return wrong


def control_of(traffic: dict[str, Traffic]) -> tuple[int, int]:
    """Requests and bytes of everything that is not data; a record's own put is data."""
    own = traffic.get("record", Traffic()).puts
    others = [found for kind, found in traffic.items() if kind not in DATA_KINDS]
    lists = sum(found.lists for found in traffic.values())
    requests = sum(found.puts + found.gets for found in others) + lists - own
    return requests, sum(found.up + found.down for found in others)


def report(wrong: list[str]) -> list[str]:
    for line in wrong:
        print(line, file=sys.stderr, flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[*range(2, 17)])
    parser.add_argument("--numel", type=int, nargs="+", default=[*NUMELS])
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=[*FEW_CODECS])
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=[*PLANS])
    parser.add_argument("--mean-codec", choices=MEANS, default=FULL_MEAN)
    given = parser.parse_args()
    torch.set_num_threads(1)
    wrong: list[str] = []
    rounds = processes = 0
    print(f"Of rank 0 (s: of the syncer), {given.codec[0]}, the largest fragment:\n")
    print("| plan | N | up, bytes | down, bytes | puts | gets | control: requests | bytes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with small_cuts():
        for plan in given.plan:
            for replicas in given.replicas:
                for codec in given.codec:
                    for numel in given.numel:
                        case = {
                            "replicas": replicas,
                            "plan": plan,
                            "codec": codec,
                            "numel": numel,
                            "mean_codec": FULL_MEAN if plan == "gather" else given.mean_codec,
                        }
                        with tempfile.TemporaryDirectory() as folder:
                            found = one_round(Path(folder), **case)  # type: ignore[arg-type]
                        wrong += report(differences(found, **case))
                        rounds, processes = rounds + 1, processes + len(found)
                        if (codec, numel) == (given.codec[0], max(given.numel)):
                            print_rows(plan, replicas, found)
    print(
        f"\n{rounds} rounds of {len(given.codec)} codecs and fragments of "
        f"{', '.join(f'{n:,}' for n in given.numel)} elements, {processes} processes: "
        f"{4 * processes - len(wrong)} of {4 * processes} counts equal the formulas"
    )
    return 1 if wrong else 0


def print_rows(plan: str, replicas: int, found: dict[int, dict[str, Traffic]]) -> None:
    for number in (0, SYNCER_NUMBER):
        if number in found:
            data = data_of(found[number])
            controls = [control_of(traffic) for n, traffic in found.items() if n != SYNCER_NUMBER]
            requests = f"{statistics.mean(c[0] for c in controls):.1f}"
            size_bytes = f"{statistics.mean(c[1] for c in controls):,.0f}"
            if number == SYNCER_NUMBER:
                counted = control_of(found[number])
                requests, size_bytes = f"{counted[0]}", f"{counted[1]:,}"
            name = f"{replicas}{' s' if number == SYNCER_NUMBER else ''}"
            print(
                f"| {plan} | {name} | {data.up:,} | {data.down:,} | {data.puts} | {data.gets} "
                f"| {requests} | {size_bytes} |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
