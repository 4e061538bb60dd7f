"""Read-only commands: ls, show, watch, logs, events, export, backends, settings, whoami."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import Any

from archipelago import files, run_commands, terminal
from archipelago.client import Client
from archipelago.errors import Invalid, Unreachable
from archipelago.frame_commands import inbox
from archipelago.list_rows import RunGroup
from archipelago.rows import SUCCEEDED, Pool, Replica, Run, RunHeader

MAX_FAILED_POLLS = 30
"""Consecutive failed polls after which ``watch`` gives up: more than a minute."""


def whoami(client: Client, options: argparse.Namespace) -> int:
    me = client.me()
    print(f"{me.user} ({me.role or 'no role yet'}) on {client.url}, scopes {', '.join(me.scopes)}")
    return 0


def ls(client: Client, options: argparse.Namespace) -> int:
    if options.group_by:
        return _groups(client, options)
    filters = {
        "states": options.state,
        "owner": options.owner,
        "backend": options.backend,
        "name": options.name,
        "query": options.query,
    }
    if options.totals:
        return _totals(client, options, filters)
    if options.all:
        runs = list(client.every_run(**filters))
    else:
        runs = list(client.runs(limit=options.limit, **filters).runs)
    if options.json:
        return terminal.print_json([run.raw for run in runs])
    if not runs:
        print("no runs" if not any(filters.values()) else "no runs match", file=sys.stderr)
        return 0
    rows = [_list_row(run) for run in runs]
    heads = [
        "ID",
        "STATE",
        "NAME",
        "OWNER",
        "ROUND",
        "LIVE",
        "LOSS",
        "TOKENS",
        "COST",
        "$/H",
        "AGE",
    ]
    head, *lines = terminal.table(heads, rows, right="llllrrrrrrr")
    print(head)
    colour = terminal.has_colour(sys.stdout)
    for run, line in zip(runs, lines, strict=True):
        print(line.replace(run.state, terminal.painted(run.state, run.state, colour=colour), 1))
    return 0


def _totals(client: Client, options: argparse.Namespace, filters: dict[str, Any]) -> int:
    """Print the totals of all runs that match."""
    total = client.runs(limit=1, totals=True, **filters).totals
    if total is None:
        raise Invalid("expected a server that sums up runs, found an earlier version")
    if options.json:
        return terminal.print_json(total.raw)
    figures = {
        "runs": terminal.count(total.runs),
        "active": terminal.count(total.active),
        "GPUs in use": terminal.lower_bound(total.gpus, known=total.gpus_known),
        "$/h": terminal.rate(total.usd_h, known=total.usd_h_known),
        "spent today": terminal.money(total.today_usd, known=total.today_known),
        "spent in all": terminal.money(total.cost_usd, known=total.cost_known),
        "open alerts": terminal.count(total.alerts),
    }
    terminal.print_facts(figures, right="lr")
    return 0


def _groups(client: Client, options: argparse.Namespace) -> int:
    """Print groups of the runs that match a query."""
    terms = [
        options.query,
        f"state:{','.join(options.state)}" if options.state else "",
        *(
            f'{name}:"{value}"'
            for name in ("owner", "backend", "name")
            if (value := getattr(options, name))
        ),
    ]
    limit = 1000 if options.all else options.limit
    found = client.run_groups(options.group_by, query=" ".join(filter(None, terms)), limit=limit)
    if options.json:
        return terminal.print_json(found.raw)
    rows = [_group_row(group) for group in [*found.groups, found.total]]
    heads = [options.group_by.upper(), "RUNS", "ACTIVE", "FAILED", "BEST", "TOKENS", "COST", "$/H"]
    terminal.print_table(heads, rows, right="lrrrrrrr")
    if not found.complete:
        print("incomplete: only the newest runs were counted", file=sys.stderr)
    return 0


def _group_row(group: RunGroup) -> list[str]:
    return [
        f"{group.others} others" if group.others else terminal.safe(group.label),
        *(str(value) for value in (group.runs, group.active, group.failed)),
        terminal.loss(group.best_eval_loss),
        terminal.count(group.tokens),
        terminal.money(group.cost_usd, known=group.cost_known),
        terminal.rate(group.usd_h, known=group.usd_h_known),
    ]


def _list_row(run: RunHeader) -> list[str]:
    return [
        run.id[:8],
        run.state,
        run.name,
        run.owner,
        f"{run.committed_rounds}/{run.total_rounds}",
        f"{run.live}/{run.target}",
        terminal.loss(run.train_loss),
        terminal.count(run.tokens),
        terminal.money(run.cost_usd, known=run.cost_known),
        terminal.rate(run.usd_h, known=run.usd_h_known),
        terminal.age(run.created_at),
    ]


def show(client: Client, options: argparse.Namespace) -> int:
    run = client.run(client.find(options.run).id)
    if options.json:
        return terminal.print_json(run.raw)
    colour = terminal.has_colour(sys.stdout)
    why = f": {terminal.block(run.state_reason)}" if run.state_reason else ""
    print(terminal.safe(f"{run.name}  {run.id}"))
    print(terminal.painted(run.state, run.state, colour=colour) + why)
    for part in (_facts(run), [], _pools(run.pools), [], _replicas(client.replicas(run.id))):
        print("\n".join(part))
    return 0


def _facts(run: Run) -> list[str]:
    budget = f" of ${run.budget_usd:,.2f}" if run.budget_usd else ""
    rounds = f"{run.committed_rounds} of {run.total_rounds}"
    values = {
        "round": f"{rounds}  {terminal.bar(run.fraction)}",
        "loss": f"{terminal.loss(run.train_loss)}, evaluation {terminal.loss(run.eval_loss)}",
        "replicas": f"{run.live} live, {run.target} wanted, quorum {run.quorum}",
        "tokens": f"{terminal.count(run.tokens)}, {terminal.count(run.tokens_per_s)} per second",
        "goodput": terminal.percent(run.goodput),
        "traffic": f"{terminal.size(run.bytes_up)} up, {terminal.size(run.bytes_down)} down",
        "cost": terminal.money(run.cost_usd, known=run.cost_known) + budget,
        "created": f"{terminal.local_time(run.created_at)} by {run.owner}",
        "rendezvous": run.rendezvous,
    }
    return terminal.facts(values)


def _pools(pools: list[Pool]) -> list[str]:
    rows = []
    for pool in pools:
        spot = "yes" if pool.spot else "no"
        live = f"{pool.live}/{pool.wanted}"
        price = terminal.money(pool.price_usd_h)
        machine = [pool.backend, pool.hardware, pool.region or "any", spot]
        rows.append([str(pool.id), *machine, live, price])
    heads = ["POOL", "BACKEND", "HARDWARE", "REGION", "SPOT", "LIVE", "PRICE/H"]
    return terminal.table(heads, rows, right="rllllrr")


def _replicas(replicas: list[Replica]) -> list[str]:
    rows = [
        [
            str(r.number),
            r.state,
            str(r.pool),
            r.backend_state or terminal.UNKNOWN,
            str(r.round),
            str(r.step),
            terminal.loss(r.loss),
            terminal.count(r.tokens_per_s),
            terminal.percent(r.wait_fraction),
            str(r.restarts),
        ]
        for r in replicas
    ]
    heads = ["REPLICA", "STATE", "POOL", "BACKEND", "ROUND", "STEP"]
    heads += ["LOSS", "TOKENS/S", "WAIT", "RESTARTS"]
    return terminal.table(heads, rows, right="rlrlrrrrrr")


def watch(client: Client, options: argparse.Namespace) -> int:
    """Show progress until the run ends. Exit status 0 if it succeeded, otherwise 1."""
    return watch_run(client, client.find(options.run), every_s=options.every)


def watch_run(client: Client, run: RunHeader, *, every_s: float) -> int:
    progress = terminal.Progress(sys.stdout)
    colour = terminal.has_colour(sys.stdout)
    last_event, failed_polls = 0, 0
    progress.log(terminal.safe(f"{run.name}  {run.id}"))
    try:
        while True:
            try:
                events = client.events(run.id, after=last_event, limit=1000)
                run = client.run(run.id)
                failed_polls = 0
            except Unreachable as error:
                failed_polls += 1
                if failed_polls == 1:
                    progress.log(f"{error}; retrying")
                if failed_polls > MAX_FAILED_POLLS:
                    raise
                client.sleep(every_s)
                continue
            for event in events:
                last_event = event.id
                if event.level != "info":
                    who = "" if event.replica is None else f"replica {event.replica}: "
                    text = terminal.block(f"{event.level}: {who}{event.message}")
                    progress.log(terminal.painted(text, event.level, colour=colour))
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
    """Print the newest lines; with ``-f`` also new ones until the run ends."""
    run = client.find(options.run)
    wanted = {"replica": options.replica, "level": options.level, "text": options.grep}
    if options.output:
        return run_commands.save_logs(client, run, options)
    colour = terminal.has_colour(sys.stdout)
    lines = client.logs(run.id, limit=options.lines, **wanted)
    last = 0
    while True:
        for line in lines:
            last = line.id
            at = terminal.local_time(line.at)
            text = terminal.block(f"{at}  {line.replica:>3}  {line.level:<7}  {line.message}")
            print(terminal.painted(text, line.level, colour=colour))
        sys.stdout.flush()
        if not options.follow:
            return 0
        over = client.run(run.id).ended if not lines else False
        lines = client.logs(run.id, after=last, limit=2000, **wanted)
        if over and not lines:
            return 0
        if not lines:
            client.sleep(options.every)


def events(client: Client, options: argparse.Namespace) -> int:
    run = client.find(options.run)
    colour = terminal.has_colour(sys.stdout)
    last = 0
    while batch := client.events(run.id, after=last, limit=1000):
        for event in batch:
            last = event.id
            who = "" if event.replica is None else f"replica {event.replica}: "
            by = f" ({event.actor})" if event.actor else ""
            text = terminal.block(f"{terminal.local_time(event.at)}  {who}{event.message}{by}")
            print(terminal.painted(text, event.level, colour=colour))
    return 0


def alerts(client: Client, options: argparse.Namespace) -> int:
    """Print the alerts. Exit status 1 if one is open and not acknowledged, for scripts."""
    if not options.run:
        return inbox(client, options)
    run = client.find(options.run).id
    rows = client.alerts(run)
    if options.acknowledge:
        if options.json:
            raise ValueError("expected --json or --acknowledge, found both")
        done = 0
        for alert in rows:
            if alert.closed_at or alert.acknowledged_by:
                continue
            if client.acknowledge_alert(run, alert.id).changed:
                done += 1
                print(terminal.block(f"acknowledged: {alert.title}: {alert.message}"))
        print(f"{done} acknowledged", file=sys.stderr)
        return 0
    colour = terminal.has_colour(sys.stdout)
    for alert in rows:
        state = "closed" if alert.closed_at else "open"
        by = f", acknowledged by {alert.acknowledged_by}" if alert.acknowledged_by else ""
        times = f" ({alert.times} times)" if alert.times > 1 else ""
        at = terminal.local_time(alert.opened_at)
        text = terminal.block(f"{at}  {state:<6}  {alert.title}: {alert.message}{times}{by}")
        print(terminal.painted(text, "" if alert.closed_at else alert.level, colour=colour))
    return 1 if any(not a.closed_at and not a.acknowledged_by for a in rows) else 0


def document(client: Client, options: argparse.Namespace) -> int:
    """Print the document as JSON, which ``submit`` accepts."""
    run = client.find(options.run)
    fork = options.fork or options.round is not None
    return terminal.print_json(client.document(run.id, fork=fork, round=options.round))


def export(client: Client, options: argparse.Namespace) -> int:
    run = client.find(options.run)
    name = options.output or f"{run.id[:8]}-{options.table}.{options.format}"
    return files.save(client.export_stream(run.id, options.table, options.format), name)


def export_runs(client: Client, options: argparse.Namespace) -> int:
    chunks = client.export_runs_stream(options.format, query=options.query)
    return files.save(chunks, options.output or f"runs.{options.format}")


def backends(client: Client, options: argparse.Namespace) -> int:
    listed = client.backends()
    if options.json:
        return terminal.print_json(listed)
    rows = [
        [
            backend["name"],
            h["name"],
            h["label"],
            terminal.money(h["price_usd_h"]),
            terminal.money(h["spot_price_usd_h"]),
        ]
        for backend in listed
        for h in backend["hardware"]
    ]
    terminal.print_table(
        ["BACKEND", "HARDWARE", "DEVICE", "PRICE/H", "SPOT/H"], rows, right="lllrr"
    )
    for backend in listed:
        if backend["credentials"]:
            names = ", ".join(backend["credentials"])
            print(terminal.safe(f"credentials for {backend['name']}: {names}"))
    return 0


def settings(client: Client, options: argparse.Namespace) -> int:
    specs = client.settings()
    if options.json:
        return terminal.print_json(specs)
    for spec in specs:
        bounds = " | ".join(spec["choices"]) or spec["unit"]
        print(
            f"{spec['name']} = {json.dumps(spec['default'])}" + (f"  ({bounds})" if bounds else "")
        )
        print(f"    {spec['help']}")
    return 0
