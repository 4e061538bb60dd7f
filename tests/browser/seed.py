"""Runs that look like real ones, written straight into the tables.

For tests of what a page shows, and for looking at it:
``ARCHIPELAGO_VAR=/tmp/look python -m tests.browser.seed`` fills a database of its own.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import random
import uuid
from typing import Any

CORRUPT = "replica 1's payload: expected crc32 5d01c2aa in block 3, found 91f00b17"
WHY = {"refused": "crc32 mismatch", "late": "committed without this replica"}
PHASES = ("compute", "encode", "upload", "wait", "download", "reduce", "apply")


def user(name: str, role: str, *, password: str = "correct horse battery") -> Any:
    """A user with one of the roles."""
    from django.contrib.auth.models import Group, User

    made, new = User.objects.get_or_create(username=name, defaults={"is_staff": role == "admin"})
    if new:
        made.set_password(password)
        made.save()
    made.groups.set([Group.objects.get_or_create(name=role)[0]] if role else [])
    return made


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
) -> Any:
    """A run of ``replicas`` after ``committed`` rounds, with curves, rounds, events and logs."""
    from runs import models
    from runs.metrics.blocks import Points
    from runs.metrics.downsampling import add_points

    chance = random.Random(seed)
    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
    round_s = 7.5
    begun = now - datetime.timedelta(seconds=committed * round_s + 14)
    settings = group_settings(
        num_replicas=replicas, total_rounds=total_rounds, sync_every=sync_every
    )
    ended = state in ("succeeded", "failed", "cancelled")
    per_step = settings["batch_size"] * 128
    made = models.Run.objects.create(
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
        first_step_at=begun + datetime.timedelta(seconds=8) if committed else None,
        ended_at=now if ended else None,
        last_seen_at=now if committed else None,
        committed_rounds=committed,
        tokens=committed * sync_every * per_step * replicas,
        train_loss=curve(committed * sync_every) if committed else None,
        eval_loss=curve(committed * sync_every) + 0.05 if committed else None,
        tokens_per_s=22_400.0 if committed else None,
        round_s=round_s if committed else None,
        bytes_up=committed * replicas * 1_950_000,
        bytes_down=committed * replicas * (replicas - 1) * 1_950_000,
        phase_s={"compute": 6.1 * committed, "wait": 0.7 * committed, "upload": 0.1 * committed}
        if committed
        else {},
    )
    pool = models.ReplicaPool.objects.create(
        run=made, backend="local", hardware="cpu", count=replicas
    )
    working = ["computing", "computing", "waiting", "uploading", "applying"]
    rows = []
    for number in range(replicas):
        own = (
            "done"
            if state == "succeeded"
            else "pending"
            if state == "queued"
            else working[number % 5]
        )
        if state == "failed":
            own = "failed"
        if state == "degraded" and number == replicas - 1:
            own = "lost"
        rows.append(
            models.Replica.objects.create(
                run=made,
                pool=pool,
                number=number,
                state=own,
                state_since=now,
                state_reason="process ended with signal 9" if own == "lost" else "",
                backend_state={"pending": "", "done": "ended", "lost": "ended"}.get(own, "running"),
                incarnation=f"00001-{chance.getrandbits(32):08x}" if committed else "",
                beat_at=now - datetime.timedelta(seconds=chance.random() * 3)
                if committed
                else None,
                beat_interval_s=2.0,
                round=committed + 1,
                step=committed * sync_every + 11,
                tokens=(committed * sync_every + 11) * per_step,
                loss=curve(committed * sync_every) + chance.gauss(0, 0.03) if committed else None,
                tokens_per_s=5600 + chance.gauss(0, 200) if committed else None,
                wait_fraction=abs(chance.gauss(0.08, 0.04)) if committed else None,
                restarts=1 if number == 2 and committed else 0,
                device="cpu, 1 thread",
                host="islet",
                pid=4242 + number,
            )
        )
    first = begun + datetime.timedelta(seconds=8)
    for replica in rows if committed else ():
        steps = list(range(1, committed * sync_every + 12))
        values = [curve(s) + chance.gauss(0, 0.09) + replica.number * 0.008 for s in steps]
        columns = {
            "step": steps,
            "round": [(s - 1) // sync_every + 1 for s in steps],
            "tokens": [s * per_step for s in steps],
            "wall_s": [first.timestamp() + s * round_s / sync_every for s in steps],
        }
        points = Points.of(**columns, value=values)
        add_points(made, replica, {"loss": points}, key="step")
        for level, message in (
            ("info", "read group.json; 675,136 parameters; model hash 5f2c91ab"),
            ("info", f"loaded checkpoint 0; {made.group_settings['max_replicas']} data shards"),
            ("warning", "upload retried once: store answered slowly"),
        ):
            models.LogLine.objects.create(
                replica=replica,
                incarnation=replica.incarnation,
                at=first,
                level=level,
                message=message,
            )
    _rounds(
        made, rows, committed, total_rounds, ended, first, round_s, sync_every, per_step, chance
    )
    if committed:
        evaluations = list(range(committed + 1))
        points = Points.of(
            step=[r * sync_every for r in evaluations],
            round=evaluations,
            tokens=[r * sync_every * per_step * replicas for r in evaluations],
            wall_s=[first.timestamp() + r * round_s for r in evaluations],
            value=[curve(r * sync_every) + 0.05 for r in evaluations],
        )
        add_points(made, None, {"eval_loss": points}, key="round")
    _events(made, rows, begun, state, reason, owner)
    return made


def _rounds(
    made: Any,
    rows: list[Any],
    committed: int,
    total: int,
    ended: bool,
    first: Any,
    round_s: float,
    sync_every: int,
    per_step: int,
    chance: random.Random,
) -> None:
    from runs import models
    from runs.metrics import round_strips
    from runs.metrics.downsampling import add_points

    stored = []

    for number in range(1, committed + 1 + (0 if ended or not committed else 1)):
        open_round = number > committed
        void = number == 5 and committed > 8
        at = first + datetime.timedelta(seconds=number * round_s)
        round_ = models.Round.objects.create(
            run=made,
            number=number,
            state="collecting" if open_round else "void" if void else "committed",
            reason=CORRUPT if void else "",
            mode="" if open_round else "gather",
            contributors=0 if void else len(rows),
            tokens_total=number * sync_every * per_step * len(rows),
            loss=None if open_round or void else curve(number * sync_every),
            eval_loss=None if open_round or void else curve(number * sync_every) + 0.05,
            weights_digest="" if open_round or void else digest(f"{made.pk}{number}"),
            committed_at=None if open_round else at,
        )
        given = []
        for replica in rows:
            state = "included"
            if open_round:
                if replica.number % 2:
                    continue
                state = "uploaded"
            elif void:
                state = "refused" if replica.number == 1 else "late"
            elif number == 8 and replica.number == 2:
                continue
            elif number == 9 and replica.number == 2:
                state = "late"
            compute = 5.9 + replica.number * 0.12 + chance.random() * 0.3
            phases = dict(
                zip(
                    PHASES,
                    (compute, 0.03, 0.09, max(0.1, 6.9 - compute), 0.16, 0.04, 0.05),
                    strict=True,
                )
            )
            contribution = models.Contribution.objects.create(
                round=round_,
                replica=replica,
                incarnation=replica.incarnation,
                state=state,
                reason=WHY.get(state, ""),
                base_round=number - 1,
                tokens=sync_every * per_step,
                steps=sync_every,
                weight=1.0,
                loss=curve(number * sync_every),
                norm=1.4 / math.sqrt(number) + chance.random() * 0.05,
                update_norm=0.0 if open_round else 0.9 / math.sqrt(number),
                cosine=None if open_round else 0.9 - 0.01 * number - 0.02 * replica.number,
                size_bytes=1_950_208,
                bytes_up=1_950_900,
                bytes_down=0 if open_round else 5_850_624,
                requests=11,
                phases={} if open_round else phases,
                started_at=at - datetime.timedelta(seconds=round_s),
                committed_at=None if open_round else at,
            )
            given.append((replica.number, contribution))
        round_strips.put(round_, given)
        round_.save(update_fields=round_strips.STRIPS)
        stored.append(round_)
    paced = [r for r in stored if r.state == "committed"]
    pace = [
        (r.number * sync_every, r.number, r.tokens_total, r.committed_at.timestamp(), 2e4 + 99 * i)
        for i, r in enumerate(paced)
    ]
    found = round_strips.curves(made, stored)
    if pace:
        found["tokens_per_s"] = round_strips.points_of(pace)
    add_points(made, None, found, key="round")


def _events(made: Any, rows: list[Any], begun: Any, state: str, reason: str, owner: Any) -> None:
    from runs import models

    def event(after_s: float, kind: str, to: str, was: str, message: str, **more: Any) -> None:
        models.Event.objects.create(
            run=made,
            at=begun + datetime.timedelta(seconds=after_s),
            kind=kind,
            from_state=was,
            to_state=to,
            message=message,
            **more,
        )

    event(0, "run_state", "queued", "draft", "submitted", actor=owner)
    if state == "queued":
        return
    event(1, "run_state", "provisioning", "queued", "launching replicas")
    for replica in rows[:8]:
        event(3, "replica_state", "provisioning", "pending", "process started", replica=replica)
    for replica in rows[:8]:
        event(6, "replica_state", "computing", "provisioning", "first beat", replica=replica)
    if state == "provisioning":
        return
    event(8, "run_state", "running", "provisioning", "all replicas live")
    if made.committed_rounds > 8:
        event(
            46,
            "round",
            "void",
            "planned",
            f"round 5 is void: {CORRUPT}",
            level="warning",
        )
    if state not in ("running", "provisioning"):
        event(
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
    """A loss that falls from ln 256 as a small model's does."""
    return 2.02 + (math.log(256) - 2.02) * math.exp(-step / 90) + 0.5 * math.exp(-step / 600)


def group_settings(**changes: Any) -> dict[str, Any]:
    from diloco.protocol.settings import GroupSettings

    replicas = changes.get("num_replicas", 4)
    return GroupSettings(**({"max_replicas": max(16, replicas)} | changes)).to_dict()


def main() -> None:
    """Users admin, olga (operator) and vera (viewer), and a list of runs in all states."""
    import os
    import sys

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    many = "many" in sys.argv
    admin, olga = user("admin", "admin"), user("olga", "operator")
    user("vera", "viewer")
    admin.is_superuser = True
    admin.save()
    if "none" in sys.argv:
        return
    if many:
        run(
            olga,
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
            reason="cannot write in s3://nobody/here: AccessDenied",
        )
        run(
            olga,
            name="Cancelled early",
            state="cancelled",
            committed=3,
            age_s=5000,
            reason="stopped by olga",
        )
        run(
            olga,
            name="A run whose name somebody made very long indeed, to see what the page does",
            state="degraded",
            committed=240,
            total_rounds=400,
            sync_every=10,
            replicas=24,
            reason="live 23 < target 24: replica 23 is lost",
        )
        run(
            olga,
            name="Waiting for a worker",
            state="queued",
            committed=0,
            reason="waiting for a worker",
        )
        run(
            olga,
            name="Just launched",
            state="provisioning",
            committed=0,
            reason="launching replicas",
        )
    run(olga, name="Local demo", reason="all 4 replicas live")


if __name__ == "__main__":
    main()
