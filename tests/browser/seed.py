"""Runs with realistic data, written directly into the tables.

For tests of pages and for manual inspection:
``ARCHIPELAGO_VAR=/tmp/look python -m tests.browser.seed`` fills a separate database.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CORRUPT = "replica 1's payload: expected crc32 5d01c2aa in block 3, found 91f00b17"
REASONS = {"refused": "crc32 mismatch", "late": "committed without this replica"}
ROUND_S = 7.5
WORKING = ("computing", "computing", "waiting", "uploading", "applying")
PHASES = ("compute", "encode", "upload", "wait", "download", "reduce", "apply")


def user(name: str, role: str, *, password: str = "correct horse battery") -> Any:
    """Return the user, created with the role if missing."""
    from django.contrib.auth.models import Group, User

    roles = [role] if role else []
    user = User.objects.filter(username=name).first()
    if user is None:
        user = User(username=name, is_staff=role == "admin")
        user.set_password(password)
        user.save()
        current = []
    else:
        current = list(user.groups.values_list("name", flat=True))
    if current != roles:
        user.groups.set([Group.objects.get_or_create(name=name)[0] for name in roles])
    return user


def run(
    owner: Any,
    *,
    name: str = "Local demo",
    state: str = "running",
    replicas: int = 4,
    total_rounds: int = 20,
    committed: int = 12,
    sync_every: int = 40,
    reason: str = "",
    seed: int = 1,
    age_s: float = 0.0,
    pk: uuid.UUID | None = None,
) -> Any:
    """Create a run of ``replicas`` after ``committed`` rounds: curves, rounds, events and logs."""
    from runs import models

    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
    begun = now - datetime.timedelta(seconds=committed * ROUND_S + 14)
    settings = group_settings(
        num_replicas=replicas, total_rounds=total_rounds, sync_every=sync_every
    )
    ended = state in ("succeeded", "failed", "cancelled")
    per_step = settings["batch_size"] * 128
    training = Training(
        committed=committed,
        sync_every=sync_every,
        per_step=per_step,
        first_step_at=begun + datetime.timedelta(seconds=8),
        ended=ended,
        rng=random.Random(seed),
    )
    run = models.Run.objects.create(
        pk=pk or uuid.uuid4(),
        name=name,
        owner=owner,
        state=state,
        state_reason=reason,
        state_since=now,
        rendezvous=f"file:///srv/archipelago/rendezvous/{uuid.uuid4()}",
        group_settings=settings,
        workload={"kind": "byte_gpt", "size": "demo", "data": "stdlib", "eval_bytes": 65_536},
        group_fingerprint=digest(name),
        submit_key=uuid.uuid4().hex,
        time_limit_s=1800,
        created_at=begun,
        started_at=begun + datetime.timedelta(seconds=2) if state != "queued" else None,
        first_step_at=training.first_step_at if committed else None,
        ended_at=now if ended else None,
        last_seen_at=now if committed else None,
        committed_rounds=committed,
        tokens=committed * sync_every * per_step * replicas,
        train_loss=curve(committed * sync_every) if committed else None,
        eval_loss=curve(committed * sync_every) + 0.05 if committed else None,
        tokens_per_s=22_400.0 if committed else None,
        round_s=ROUND_S if committed else None,
        bytes_up=committed * replicas * 1_950_000,
        bytes_down=committed * replicas * (replicas - 1) * 1_950_000,
        phase_s={"compute": 6.1 * committed, "wait": 0.7 * committed, "upload": 0.1 * committed}
        if committed
        else {},
    )
    rows = _replicas(run, replicas, training, now)
    if committed:
        for replica in rows:
            _losses(run, replica, training)
            _log_lines(replica, training)
    _rounds(run, rows, training)
    if committed:
        _evaluations(run, training)
    models.Event.objects.bulk_create(_events(run, rows, begun, reason))
    return run


@dataclass(frozen=True, kw_only=True)
class Training:
    """Size and times of the training of a run. ``per_step``: tokens of a step of one replica."""

    committed: int
    sync_every: int
    per_step: int
    first_step_at: datetime.datetime
    ended: bool
    rng: random.Random

    @property
    def steps(self) -> int:
        return self.committed * self.sync_every


def _replicas(run: Any, count: int, training: Training, now: datetime.datetime) -> list[Any]:
    from runs import models

    pool = models.ReplicaPool.objects.create(run=run, backend="local", hardware="cpu", count=count)
    return [_replica(pool, number, training, now) for number in range(count)]


def _replica(pool: Any, number: int, training: Training, now: datetime.datetime) -> Any:
    from runs import models

    run, rng, trained = pool.run, training.rng, training.committed > 0
    state = WORKING[number % len(WORKING)]
    state = {"succeeded": "done", "queued": "pending", "failed": "failed"}.get(run.state, state)
    if run.state == "degraded" and number == pool.count - 1:
        state = "lost"
    return models.Replica.objects.create(
        run=run,
        pool=pool,
        number=number,
        state=state,
        state_since=now,
        state_reason="process ended with signal 9" if state == "lost" else "",
        backend_state={"pending": "", "done": "ended", "lost": "ended"}.get(state, "running"),
        incarnation=f"00001-{rng.getrandbits(32):08x}" if trained else "",
        beat_at=now - datetime.timedelta(seconds=rng.random() * 3) if trained else None,
        beat_interval_s=2.0,
        round=training.committed + 1,
        step=training.steps + 11,
        tokens=(training.steps + 11) * training.per_step,
        loss=curve(training.steps) + rng.gauss(0, 0.03) if trained else None,
        tokens_per_s=5600 + rng.gauss(0, 200) if trained else None,
        wait_fraction=abs(rng.gauss(0.08, 0.04)) if trained else None,
        restarts=1 if number == 2 and trained else 0,
        device="cpu, 1 thread",
        host="islet",
        pid=4242 + number,
    )


def _losses(run: Any, replica: Any, training: Training) -> None:
    from runs.metrics.blocks import Points
    from runs.metrics.downsampling import add_points

    steps = list(range(1, training.steps + 12))
    begun = training.first_step_at.timestamp()
    noise = [training.rng.gauss(0, 0.09) for _ in steps]
    points = Points.of(
        step=steps,
        round=[(s - 1) // training.sync_every + 1 for s in steps],
        tokens=[s * training.per_step for s in steps],
        wall_s=[begun + s * ROUND_S / training.sync_every for s in steps],
        value=[curve(s) + n + replica.number * 0.008 for s, n in zip(steps, noise, strict=True)],
    )
    add_points(run, replica, {"loss": points}, key="step")


def _log_lines(replica: Any, training: Training) -> None:
    from runs import models

    shards = replica.run.group_settings["max_replicas"]
    models.LogLine.objects.bulk_create(
        models.LogLine(
            replica=replica,
            incarnation=replica.incarnation,
            at=training.first_step_at,
            level=level,
            message=message,
        )
        for level, message in (
            ("info", "read group.json; 675,136 parameters; model hash 5f2c91ab"),
            ("info", f"loaded checkpoint 0; {shards} data shards"),
            ("warning", "upload retried once: store answered slowly"),
        )
    )


def _evaluations(run: Any, training: Training) -> None:
    from runs.metrics.blocks import Points
    from runs.metrics.downsampling import add_points

    rounds = list(range(training.committed + 1))
    steps = [r * training.sync_every for r in rounds]
    begun = training.first_step_at.timestamp()
    points = Points.of(
        step=steps,
        round=rounds,
        tokens=[s * training.per_step * run.group_settings["num_replicas"] for s in steps],
        wall_s=[begun + r * ROUND_S for r in rounds],
        value=[curve(s) + 0.05 for s in steps],
    )
    add_points(run, None, {"eval_loss": points}, key="round")


def _rounds(run: Any, rows: list[Any], training: Training) -> None:
    from runs import models
    from runs.metrics import round_strips
    from runs.metrics.downsampling import add_points

    last = training.committed + (0 if training.ended or not training.committed else 1)
    made = [_round(run, rows, training, number) for number in range(1, last + 1)]
    stored = models.Round.objects.bulk_create(row for row, _ in made)
    models.Contribution.objects.bulk_create(c for _, contributions in made for c in contributions)
    committed = [r for r in stored if r.state == "committed"]
    speeds = [
        (
            r.number * training.sync_every,
            r.number,
            r.tokens_total,
            r.committed_at.timestamp(),
            2e4 + 99 * i,
        )
        for i, r in enumerate(committed)
    ]
    series = round_strips.curves(run, stored)
    if speeds:
        series["tokens_per_s"] = round_strips.points_of(speeds)
    add_points(run, None, series, key="round")


def _round(run: Any, rows: list[Any], training: Training, number: int) -> tuple[Any, list[Any]]:
    """Return a round and its contributions, not saved. The last round is open, and round 5 of more
    than 8 is void."""
    from runs import models
    from runs.metrics import round_strips

    is_open = number > training.committed
    is_void = number == 5 and training.committed > 8
    steps = number * training.sync_every
    at = training.first_step_at + datetime.timedelta(seconds=number * ROUND_S)
    row = models.Round(
        run=run,
        number=number,
        state="collecting" if is_open else "void" if is_void else "committed",
        reason=CORRUPT if is_void else "",
        mode="" if is_open else "gather",
        contributors=0 if is_void or is_open else len(rows),
        tokens_total=steps * training.per_step * len(rows),
        loss=None if is_open or is_void else curve(steps),
        eval_loss=None if is_open or is_void else curve(steps) + 0.05,
        weights_digest="" if is_open or is_void else digest(f"{run.pk}{number}"),
        committed_at=None if is_open else at,
    )
    contributions = [
        _contribution(row, replica, state, training, at)
        for replica in rows
        if (state := _outcome(row, replica.number))
    ]
    round_strips.put(row, [(c.replica.number, c) for c in contributions])
    return row, contributions


def _outcome(row: Any, replica: int) -> str:
    """The state of a contribution; '' without one."""
    if row.state == "collecting":
        return "" if replica % 2 else "uploaded"
    if row.state == "void":
        return "refused" if replica == 1 else "late"
    if row.number in (8, 9) and replica == 2:
        return {8: "", 9: "late"}[row.number]
    return "included"


def _contribution(
    row: Any, replica: Any, state: str, training: Training, at: datetime.datetime
) -> Any:
    from runs import models

    is_open, number = row.state == "collecting", row.number
    compute_s = 5.9 + replica.number * 0.12 + training.rng.random() * 0.3
    seconds = (compute_s, 0.03, 0.09, max(0.1, 6.9 - compute_s), 0.16, 0.04, 0.05)
    return models.Contribution(
        round=row,
        replica=replica,
        incarnation=replica.incarnation,
        state=state,
        reason=REASONS.get(state, ""),
        base_round=number - 1,
        tokens=training.sync_every * training.per_step,
        steps=training.sync_every,
        weight=1.0,
        loss=curve(number * training.sync_every),
        norm=1.4 / math.sqrt(number) + training.rng.random() * 0.05,
        update_norm=0.0 if is_open else 0.9 / math.sqrt(number),
        cosine=None if is_open else 0.9 - 0.01 * number - 0.02 * replica.number,
        size_bytes=1_950_208,
        bytes_up=1_950_900,
        bytes_down=0 if is_open else 5_850_624,
        requests=11,
        phases={} if is_open else dict(zip(PHASES, seconds, strict=True)),
        started_at=at - datetime.timedelta(seconds=ROUND_S),
        committed_at=None if is_open else at,
    )


def _events(run: Any, rows: list[Any], begun: datetime.datetime, reason: str) -> Iterator[Any]:
    """Return the events of a run, not saved."""
    from runs import models

    state = run.state

    def event(after_s: float, kind: str, to: str, was: str, message: str, **more: Any) -> Any:
        return models.Event(
            run=run,
            at=begun + datetime.timedelta(seconds=after_s),
            kind=kind,
            from_state=was,
            to_state=to,
            message=message,
            **more,
        )

    yield event(0, "run_state", "queued", "draft", "submitted", actor=run.owner)
    if state == "queued":
        return
    yield event(1, "run_state", "provisioning", "queued", "launching replicas")
    for replica in rows[:8]:
        yield event(
            3, "replica_state", "provisioning", "pending", "process started", replica=replica
        )
    for replica in rows[:8]:
        yield event(
            6, "replica_state", "computing", "provisioning", "first heartbeat", replica=replica
        )
    if state == "provisioning":
        return
    yield event(8, "run_state", "running", "provisioning", "all replicas live")
    if run.committed_rounds > 8:
        yield event(
            46,
            "round",
            "void",
            "planned",
            f"round 5 is void: {CORRUPT}",
            level="warning",
        )
    if state not in ("running", "provisioning"):
        yield event(
            90,
            "run_state",
            state,
            "running",
            reason or state,
            level={"failed": "error", "degraded": "warning"}.get(state, "info"),
        )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def curve(step: float) -> float:
    """The loss of a small byte-level model, which starts at ln 256."""
    return 2.02 + (math.log(256) - 2.02) * math.exp(-step / 90) + 0.5 * math.exp(-step / 600)


def group_settings(**changes: Any) -> dict[str, Any]:
    from diloco.protocol.settings import GroupSettings

    replicas = changes.get("num_replicas", 4)
    return GroupSettings(**({"max_replicas": max(16, replicas)} | changes)).to_dict()


def main() -> None:
    """Create the users admin, olga (operator) and vera (viewer), and runs.

    The argument ``many`` adds runs in all states; ``none`` creates users only.
    """
    import os
    import sys

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    many = "many" in sys.argv
    admin, operator_user = user("admin", "admin"), user("olga", "operator")
    user("vera", "viewer")
    admin.is_superuser = True
    admin.save()
    if "none" in sys.argv:
        return
    if many:
        run(
            operator_user,
            name="Nightly sweep of the small model",
            state="succeeded",
            committed=20,
            age_s=9000,
        )
        run(
            admin,
            name="Bad bucket",
            state="failed",
            committed=0,
            age_s=7000,
            reason="cannot write in s3://missing/here: AccessDenied",
        )
        run(
            operator_user,
            name="Cancelled early",
            state="cancelled",
            committed=3,
            age_s=5000,
            reason="stopped by olga",
        )
        run(
            operator_user,
            name="A run with a very long name that shows how the page wraps and truncates it",
            state="degraded",
            committed=240,
            total_rounds=400,
            sync_every=10,
            replicas=24,
            reason="live 23 < target 24: replica 23 is lost",
        )
        run(
            operator_user,
            name="Waiting for a worker",
            state="queued",
            committed=0,
            reason="waiting for a worker",
        )
        run(
            operator_user,
            name="Just launched",
            state="provisioning",
            committed=0,
            reason="launching replicas",
        )
    run(operator_user, name="Local demo", reason="all 4 replicas live")


if __name__ == "__main__":
    main()
