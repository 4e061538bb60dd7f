"""Goodput of a group whose replicas are killed, under virtual time.

The library's own replicas train a tiny model over a bucket in memory whose requests take 5 to 100
ms (:mod:`tests.diloco.model`). Each is killed after exponential times and starts again
``--away-s`` later: relaunch, imports and download of the model, which take no virtual time
themselves. A run is a function of its seed, on any machine and under any load.

*Goodput* is the tokens of committed rounds a second, divided by those of the same group without
kills. *Waiting* is how much longer the rounds took, a kill. The prediction is that of
``python -m diloco.simulate``. ``bench/chaos.py`` measures the same with processes and SIGKILL.

Usage: python bench/virtual_chaos.py [--seeds 3] [--replicas 5] [--round-s 2] [--timeout-s 5]
       [--mtbf-s 120] [--away-s 4.6] [--kills 60]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from diloco.planner.availability import estimate_availability
from diloco.protocol import keys
from diloco.protocol.records import Commit
from diloco.protocol.settings import GroupSettings
from tests.diloco.model.harness import NO_FAULTS, Harness, Life, Scenario, virtual
from tests.diloco.model.virtual_time import Process

STEPS = 20
"""Inner steps of a round."""
WARM_UP = 4
"""Rounds before the measurement."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group, the mean life of its replicas' processes (0: no kills), and the kills to count."""

    replicas: int = 5
    round_s: float = 2.0
    timeout_s: float = 5.0
    mtbf_s: float = 120.0
    away_s: float = 4.6
    kills: int = 60
    seed: int = 0

    @property
    def settings(self) -> GroupSettings:
        return GroupSettings(
            num_replicas=self.replicas,
            min_quorum=min(2, self.replicas),
            start_replicas=self.replicas,
            sync_every=STEPS,
            total_rounds=1_000_000,
            warmup_steps=0,
            eval_every=0,
            checkpoint_every=5,
            state_every=0,
            grace_s=2.0,
            heartbeat_timeout_s=self.timeout_s,
        )

    @property
    def seconds(self) -> float:
        """Time in which so many kills are expected."""
        return self.kills * (self.mtbf_s + self.away_s) / self.replicas


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The committed work of a group in ``seconds``."""

    seconds: float
    rounds: int
    tokens: int
    kills: int
    contributors: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class KilledGroup(Harness):
    """Runs the group of a :class:`Case`, with its kills."""

    def __init__(self, case: Case) -> None:
        step_s = case.round_s / STEPS
        scenario = Scenario(
            settings=case.settings,
            chances=NO_FAULTS,
            replicas=case.replicas,
            step_s=dict.fromkeys(range(case.replicas), step_s),
        )
        super().__init__(scenario, random.Random(case.seed))
        self.bucket.keeps_past = False
        self.case = case
        self.kills = 0
        self.lifetimes = random.Random(case.seed)

    def outcome(self) -> Outcome:
        for replica in range(self.case.replicas):
            self.launch(replica)
        try:
            self.scheduler.run(until=lambda: self.committed() >= WARM_UP, deadline_s=1e9)
            began_s = self.scheduler.now_s
            if self.case.mtbf_s:
                for life in list(self.lives):
                    self._kill_again_and_again(life)
            end_s = began_s + (self.case.seconds if self.case.mtbf_s else 60 * self.case.round_s)
            self.scheduler.spawn("end", lambda: self.scheduler.sleep(end_s - began_s))
            self.scheduler.run(until=lambda: self.scheduler.now_s >= end_s, deadline_s=1e9)
        finally:
            self.scheduler.close()
        self._check()
        commits = [
            Commit.from_bytes(self.bucket.written[keys.commit(round)])
            for round in range(WARM_UP, self.committed() + 1)
        ]
        return Outcome(
            seconds=commits[-1].wall_s - commits[0].wall_s,
            rounds=len(commits) - 1,
            tokens=commits[-1].tokens_total - commits[0].tokens_total,
            kills=self.kills,
            contributors=statistics.fmean(len(commit.contributors) for commit in commits[1:]),
        )

    def _kill_again_and_again(self, life: Life) -> None:
        def work() -> None:
            current = life
            while True:
                self.scheduler.sleep(self.lifetimes.expovariate(1 / self.case.mtbf_s))
                self.kills += 1
                self.scheduler.kill(current.process)
                self.scheduler.sleep(self.case.away_s)
                self.launch(life.replica)
                current = self.lives[-1]

        self.scheduler.spawn(f"kills of replica {life.replica}", work, Process("killer"))

    def _check(self) -> None:
        errors = [life.error for life in self.lives if life.error is not None]
        if errors:
            raise SystemExit(f"expected replicas to end by kills alone, found {errors[0]!r}")


def run(case: Case) -> Outcome:
    """Run the group of ``case``; deterministic."""
    torch.set_num_threads(1)
    group = KilledGroup(case)
    with virtual(group):
        return group.outcome()


def report(case: Case) -> float:
    """Print a row of the table; return the goodput."""
    calm, killed = run(replace(case, mtbf_s=0)), run(case)
    goodput = killed.tokens_per_s / calm.tokens_per_s
    calm_round_s = calm.seconds / calm.rounds
    waiting_s = (killed.seconds - killed.rounds * calm_round_s) / max(1, killed.kills)
    predicted = estimate_availability(
        case.settings,
        mtbf_s=case.mtbf_s,
        away_s=case.away_s,
        step_s=calm_round_s / STEPS,
    )
    print(
        f"| {case.seed} | {killed.kills} | {killed.rounds} | {calm_round_s:.2f} "
        f"| {100 * killed.contributors / case.replicas:.1f} % | {waiting_s:.2f} "
        f"| {100 * goodput:.1f} % | {100 * predicted.goodput:.1f} % |",
        flush=True,
    )
    return goodput


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=2.0)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--mtbf-s", type=float, default=120.0)
    parser.add_argument("--away-s", type=float, default=4.6)
    parser.add_argument("--kills", type=int, default=60)
    arguments = vars(parser.parse_args())
    seeds = arguments.pop("seeds")
    print("| seed | kills | rounds | s a round | contributors | waiting, s | goodput | predicted |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    found = [report(Case(**arguments, seed=seed)) for seed in range(seeds)]
    print(f"goodput: {100 * statistics.fmean(found):.1f} % on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
