"""Commands that only look: ls, show, watch, logs, events, export, backends, settings, whoami."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from archipelago import terminal
from archipelago.client import Client
from archipelago.errors import Unreachable
from archipelago.rows import SUCCEEDED, Pool, Replica, Run

AWAY_TRIES = 30
"""Answers in a row that may be missing before a watch gives up: about a minute and more."""


def whoami(client: Client, options: argparse.Namespace) -> int:
    me = client.me()
    print(f"{me.user} ({me.role or 'no role yet'}) on {client.url}, scopes {', '.join(me.scopes)}")
    return 0


def ls(client: Client, options: argparse.Namespace) -> int:
    filters = {
        "states": options.state, "owner": options.owner, "backend": options.backend,
        "name": options.name, "query": options.query,
    }  # fmt: skip
    if options.all:
        found = list(client.every_run(**filters))
    else:
        found = list(client.runs(limit=options.limit, **filters).runs)
    if options.json:
        return _json([run.raw for run in found])
    if not found:
        print("no runs" if not any(filters.values()) else "no run fits", file=sys.stderr)
        return 0
    rows = [
        [
            run.id[:8], run.state, run.name, run.owner,
            f"{run.committed_rounds}/{run.total_rounds}", f"{run.live}/{run.target}",
            terminal.loss(run.train_loss), terminal.count(run.tokens),
            terminal.money(run.cost_usd, known=run.cost_known), terminal.age(run.created_at),
        ]
        for run in found
    ]  # fmt: skip
    heads = ["ID", "STATE", "NAME", "OWNER", "ROUND", "LIVE", "LOSS", "TOKENS", "COST", "AGE"]
    head, *lines = terminal.table(heads, rows, right="llllrrrrrr")
    print(head)
    colour = terminal.has_colour(sys.stdout)
    for run, line in zip(found, lines, strict=True):
        print(line.replace(run.state, terminal.painted(run.state, run.state, colour=colour), 1))
    return 0


def show(client: Client, options: argparse.Namespace) -> int:
    run = client.run(client.find(options.run).id)
    if options.json:
        return _json(run.raw)
    colour = terminal.has_colour(sys.stdout)
    why = f": {terminal.block(run.state_reason)}" if run.state_reason else ""
    print(terminal.safe(f"{run.name}  {run.id}"))
    print(terminal.painted(run.state, run.state, colour=colour) + why)
    for part in (_facts(run), [], _pools(run), [], _replicas(client.replicas(run.id))):
        print("\n".join(part))
    return 0


def _facts(run: Run) -> list[str]:
    budget = f" of ${run.budget_usd:,.2f}" if run.budget_usd else ""
    rounds = f"{run.committed_rounds} of {run.total_rounds}"
    facts = {
        "round": f"{rounds}  {terminal.bar(run.fraction)}",
        "loss": f"{terminal.loss(run.train_loss)}, evaluation {terminal.loss(run.eval_loss)}",
        "replicas": f"{run.live} live, {run.target} wanted, quorum {run.quorum}",
        "tokens": f"{terminal.count(run.tokens)}, {terminal.count(run.tokens_per_s)} a second",
        "goodput": terminal.percent(run.goodput),
        "moved": f"{terminal.size(run.bytes_up)} up, {terminal.size(run.bytes_down)} down",
        "cost": terminal.money(run.cost_usd, known=run.cost_known) + budget,
        "created": f"{terminal.local_time(run.created_at)} by {run.owner}",
        "rendezvous": str(run.raw.get("rendezvous", "")),
    }
    return terminal.table(["", ""], [[name, value] for name, value in facts.items()])[1:]


def _pools(run: Run) -> list[str]:
    rows = []
    for pool in map(Pool.of, run.raw["pools"]):
        spot = "yes" if pool.spot else "no"
        rows.append([
            str(pool.id), pool.backend, pool.hardware, pool.region or "any", spot,
            f"{pool.live}/{pool.wanted}", terminal.money(pool.price_usd_h),
        ])  # fmt: skip
    heads = ["POOL", "BACKEND", "HARDWARE", "REGION", "SPOT", "LIVE", "PRICE/H"]
    return terminal.table(heads, rows, right="rllllrr")


def _replicas(replicas: list[Replica]) -> list[str]:
    rows = [
        [
            str(r.number), r.state, str(r.pool), r.backend_state or terminal.UNKNOWN, str(r.round),
            str(r.step), terminal.loss(r.loss), terminal.count(r.tokens_per_s),
            terminal.percent(r.wait_fraction), str(r.restarts),
        ]
        for r in replicas
    ]  # fmt: skip
    heads = ["REPLICA", "STATE", "POOL", "BACKEND", "ROUND", "STEP", "LOSS", "TOKENS/S", "WAIT",
             "RESTARTS"]  # fmt: skip
    return terminal.table(heads, rows, right="rlrlrrrrrr")


def watch(client: Client, options: argparse.Namespace) -> int:
    """Until the run is over: 0 when it has succeeded, 1 otherwise."""
    return watch_run(client, client.find(options.run), every_s=options.every)


def watch_run(client: Client, run: Run, *, every_s: float) -> int:
    progress = terminal.Progress(sys.stdout)
    colour = terminal.has_colour(sys.stdout)
    last_event, away = 0, 0
    progress.say(terminal.safe(f"{run.name}  {run.id}"))
    try:
        while True:
            try:
                events = client.events(run.id, after=last_event, limit=1000)
                run = client.run(run.id)
                away = 0
            except Unreachable as error:
                away += 1
                if away == 1:
                    progress.say(f"{error}; trying again")
                if away > AWAY_TRIES:
                    raise
                client.sleep(every_s)
                continue
            for event in events:
                last_event = event.id
                if event.level != "info":
                    who = "" if event.replica is None else f"replica {event.replica}: "
                    said = terminal.block(f"{event.level}: {who}{event.message}")
                    progress.say(terminal.painted(said, event.level, colour=colour))
            progress.show(run, now=datetime.now(UTC))
            if run.ended:
                progress.finish()
                why = f": {terminal.block(run.state_reason)}" if run.state_reason else ""
                print(f"{run.state}{why}")
                return 0 if run.state == SUCCEEDED else 1
            client.sleep(every_s)
    finally:
        progress.finish()


def logs(client: Client, options: argparse.Namespace) -> int:
    """Newest lines; with ``-f`` what comes after them, until the run is over."""
    run = client.find(options.run)
    wanted = {"replica": options.replica, "level": options.level, "text": options.grep}
    colour = terminal.has_colour(sys.stdout)
    found = client.logs(run.id, limit=options.lines, **wanted)
    last = 0
    while True:
        for line in found:
            last = line.id
            at = terminal.local_time(line.at)
            said = terminal.block(f"{at}  {line.replica:>3}  {line.level:<7}  {line.message}")
            print(terminal.painted(said, line.level, colour=colour))
        sys.stdout.flush()
        if not options.follow:
            return 0
        over = client.run(run.id).ended if not found else False
        found = client.logs(run.id, after=last, limit=2000, **wanted)
        if over and not found:
            return 0
        if not found:
            client.sleep(options.every)


def events(client: Client, options: argparse.Namespace) -> int:
    run = client.find(options.run)
    colour = terminal.has_colour(sys.stdout)
    last = 0
    while found := client.events(run.id, after=last, limit=1000):
        for event in found:
            last = event.id
            who = "" if event.replica is None else f"replica {event.replica}: "
            by = f" ({event.actor})" if event.actor else ""
            said = terminal.block(f"{terminal.local_time(event.at)}  {who}{event.message}{by}")
            print(terminal.painted(said, event.level, colour=colour))
    return 0


def alerts(client: Client, options: argparse.Namespace) -> int:
    """Status 1 when one is open that nobody has acknowledged: for scripts."""
    found = client.alerts(client.find(options.run).id)
    colour = terminal.has_colour(sys.stdout)
    for alert in found:
        state = "closed" if alert.closed_at else "open"
        by = f", {alert.acknowledged_by} looks after it" if alert.acknowledged_by else ""
        times = f" ({alert.times} times)" if alert.times > 1 else ""
        at = terminal.local_time(alert.opened_at)
        said = terminal.block(f"{at}  {state:<6}  {alert.title}: {alert.message}{times}{by}")
        print(terminal.painted(said, "" if alert.closed_at else alert.level, colour=colour))
    return 1 if any(not a.closed_at and not a.acknowledged_by for a in found) else 0


def document(client: Client, options: argparse.Namespace) -> int:
    """As JSON, which submit takes as well."""
    run = client.find(options.run)
    fork = options.fork or options.round is not None
    return _json(client.document(run.id, fork=fork, round=options.round))


def export(client: Client, options: argparse.Namespace) -> int:
    run = client.find(options.run)
    if options.output == "-":
        for chunk in client.export_stream(run.id, options.table, options.format):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return 0
    name = options.output or f"{run.id[:8]}-{options.table}.{options.format}"
    written = client.export(run.id, options.table, options.format, to=Path(name))
    print(f"{name}: {terminal.size(written)}", file=sys.stderr)
    return 0


def backends(client: Client, options: argparse.Namespace) -> int:
    found = client.backends()
    if options.json:
        return _json(found)
    rows = [
        [b["name"], h["name"], h["label"], terminal.money(h["price_usd_h"]),
         terminal.money(h["spot_price_usd_h"])]
        for b in found
        for h in b["hardware"]
    ]  # fmt: skip
    for line in terminal.table(
        ["BACKEND", "HARDWARE", "IS", "PRICE/H", "SPOT/H"], rows, right="lllrr"
    ):
        print(line)
    for backend in found:
        if backend["credentials"]:
            names = ", ".join(backend["credentials"])
            print(terminal.safe(f"credentials for {backend['name']}: {names}"))
    return 0


def settings(client: Client, options: argparse.Namespace) -> int:
    found = client.settings()
    if options.json:
        return _json(found)
    for spec in found:
        bounds = " | ".join(spec["choices"]) or spec["unit"]
        print(
            f"{spec['name']} = {json.dumps(spec['default'])}" + (f"  ({bounds})" if bounds else "")
        )
        print(f"    {spec['help']}")
    return 0


def _json(value: Any) -> int:
    json.dump(value, sys.stdout, indent=2, default=dict)
    print()
    return 0
