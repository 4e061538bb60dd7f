"""Commands that change something (login, submit, stop, restart), and the dry run ``plan``."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

from archipelago import login as logins
from archipelago import terminal
from archipelago.client import Client
from archipelago.documents import EXAMPLE, read_run
from archipelago.errors import Invalid
from archipelago.read_commands import watch_run
from archipelago.rows import ENDED, DeletionPlan, Done, RunHeader

MOST_MATCHING = 500
"""Runs that one command stops, as in the list of the dashboard."""


def login(options: argparse.Namespace) -> int:
    """Store a server's URL and token. The token is read from a prompt or from standard input, so
    that it does not enter the shell history."""
    url = logins.check_url(options.url)
    if logins.is_exposed(url):
        print(f"warning: {url} is not encrypted: the token can be intercepted", file=sys.stderr)
    if options.token_stdin or not sys.stdin.isatty():
        token = sys.stdin.readline().strip()
    else:
        print(f"Create a token at {url}/account/tokens and paste it here.", file=sys.stderr)
        token = getpass.getpass("Token: ").strip()
    if not token:
        raise ValueError("expected a token, found none")
    me = Client(url, token).me()
    path = logins.write_login(logins.Login(url=url, token=token))
    print(f"signed in as {me.user} ({me.role or 'no role yet'}); token saved in {path}")
    return 0


def logout(options: argparse.Namespace) -> int:
    if logins.forget_login():
        print("login deleted from this machine; revoke the token on the server")
    else:
        print("not signed in")
    return 0


def example(options: argparse.Namespace) -> int:
    print(EXAMPLE, end="")
    return 0


def submit(client: Client, options: argparse.Namespace) -> int:
    document = read_run(client, options.file)
    run = client.submit(document, key=options.key)
    print(run.id if options.quiet else terminal.safe(f"{run.name}  {client.url}/runs/{run.id}/"))
    return watch_run(client, run, every_s=options.every) if options.watch else 0


def plan(client: Client, options: argparse.Namespace) -> int:
    """Print the estimate of a document. The exit status is 6 if the server would reject it."""
    document = read_run(client, options.file)
    result = client.plan(document, ask=not options.offline)
    terminal.print_facts(_estimate(result["estimate"]))
    return print_problems(result["problems"])


def print_problems(problems: list[dict[str, Any]]) -> int:
    """Print why the server would reject a document; returns the exit status."""
    for problem in problems:
        print(terminal.block(f"{problem['field']}: {problem['message']}"), file=sys.stderr)
    return Invalid.exit_code if problems else 0


def _estimate(e: dict[str, Any]) -> dict[str, str]:
    up, down = e["up_bytes_per_round"], e["down_bytes_per_round"]
    saved = "" if e["reduction"] is None else f", {e['reduction']:,.0f} times less than all-reduce"
    return {
        "parameters": terminal.count(e["parameters"]),
        "rounds": f"{e['rounds']:,} of {terminal.count(e['tokens_per_round'])} tokens",
        "tokens": terminal.count(e["tokens"]),
        "plan": e["reduce_plan"],
        "traffic per round": f"{terminal.size(up)} up, {terminal.size(down)} down per replica",
        "total traffic": f"{terminal.size(e['total_bytes'])}{saved}",
        "cost per hour": terminal.money(e["usd_h"]),
        "total cost": e["usd_text"],
    }


def stop(client: Client, options: argparse.Namespace) -> int:
    """Stop the run, or one replica with ``--replica``."""
    run = client.find(options.run)
    if options.replica is None:
        done = client.stop(run.id, reason=options.reason, force=options.force)
        what = run.name
    else:
        done = client.stop_replica(run.id, options.replica, force=options.force)
        what = f"replica {options.replica}"
    print(terminal.safe(f"{what}: {done.state}" + ("" if done.changed else " already")))
    return 0


def stop_matching(client: Client, options: argparse.Namespace) -> int:
    """Stop the active runs that match a query, each as :func:`stop` does. Their number is required
    as a confirmation; without ``--count`` it is read from standard input.

    Returns 1 if a run was refused, after the others.
    """
    found = client.every_run(query=options.query)
    runs = list(islice((run for run in found if run.state not in ENDED), MOST_MATCHING + 1))
    if len(runs) > MOST_MATCHING:
        raise ValueError(f"expected at most {MOST_MATCHING} runs, found more. Narrow the query")
    if not runs:
        print("No active run matches.")
        return 0
    count = options.count
    if count is None:
        for run in runs:
            print(terminal.safe(f"{run.name} ({run.owner}, {run.state})"), file=sys.stderr)
        print(f"Enter the number of runs to stop: {len(runs)}", file=sys.stderr)
        typed = sys.stdin.readline().strip()
        count = int(typed) if typed.isdecimal() else None
    if count is None:
        raise ValueError(f"expected {len(runs)}, the number of active runs that match")
    ids = [run.id for run in runs]
    results = client.act_on_runs("stop", ids=ids, count=count, reason=options.reason)
    for one in results:
        if one.refusal:
            print(terminal.safe(f"{one.name}: {one.refusal}"), file=sys.stderr)
        else:
            print(terminal.safe(f"{one.name}: {one.state}{'' if one.changed else ' already'}"))
    return int(any(one.refusal for one in results))


def pause(client: Client, options: argparse.Namespace) -> int:
    return _report(client.find(options.run), client.pause)


def resume(client: Client, options: argparse.Namespace) -> int:
    return _report(client.find(options.run), client.resume)


def save(client: Client, options: argparse.Namespace) -> int:
    return _report(client.find(options.run), client.save)


def describe(client: Client, options: argparse.Namespace) -> int:
    """Set the notes and tags of a run, or archive it."""
    archived = True if options.archive else False if options.unarchive else None
    if options.notes is None and options.tag is None and archived is None:
        raise ValueError("expected --notes, --tag, --archive or --unarchive, found none")
    run = client.find(options.run)
    tags = None if options.tag is None else [tag for tag in options.tag if tag]
    done = client.describe(run.id, notes=options.notes, tags=tags, archived=archived)
    print(terminal.safe(f"{run.name}: {'saved' if done.changed else 'unchanged'}"))
    return 0


def delete(client: Client, options: argparse.Namespace) -> int:
    """Delete a finished run. The name is required as a confirmation; without ``--name`` it is read
    from standard input."""
    run = client.find(options.run)
    if options.objects:
        for line in _deletion(client.deletion(run.id)):
            print(terminal.safe(line), file=sys.stderr)
    name = options.name
    if name is None:
        print(terminal.safe(f"Enter the run's name to delete it: {run.name}"), file=sys.stderr)
        name = sys.stdin.readline().rstrip("\n")
    client.delete(run.id, name=name, objects=options.objects)
    print(terminal.safe(f"{run.name}: deleting"))
    return 0


def _deletion(plan: DeletionPlan) -> list[str]:
    """Lines that list the objects to delete and to keep."""
    if plan.refusal:
        return [f"No object can be deleted: {plan.refusal}"]
    more = "" if plan.whole else "more than "
    lines = [f"Deletes {more}{plan.objects} objects, {plan.size_bytes} bytes:"]
    lines += [
        f"  {part.kind:<14}{part.objects:>8} objects {part.size_bytes:>16} bytes"
        for part in plan.deleted
    ]
    if plan.kept:
        lines.append(f"Keeps {plan.kept} objects that do not belong to the run:")
        lines += [f"  {name}" for name in plan.kept_names]
        lines += ["  and more"] if plan.kept > len(plan.kept_names) else []
    return lines


def _report(run: RunHeader, action: Callable[[str], Done]) -> int:
    done = action(run.id)
    print(terminal.safe(f"{run.name}: {done.state}" + ("" if done.changed else " already")))
    return 0


def restart(client: Client, options: argparse.Namespace) -> int:
    run = client.find(options.run)
    done = client.restart_replica(run.id, options.replica, force=options.force)
    print(f"replica {options.replica}: {done.state}" + ("" if done.changed else " already"))
    return 0


def scale(client: Client, options: argparse.Namespace) -> int:
    run = client.find(options.run)
    pools = client.pools(run.id)
    pool = options.pool
    if pool is None:
        if len(pools) != 1:
            known = ", ".join(f"{p.id} ({p.backend} {p.hardware})" for p in pools)
            raise ValueError(f"expected --pool with one of {known}, found none")
        pool = pools[0].id
    done = client.scale(run.id, pool, options.count)
    change = f"{abs(done.change)} {'more' if done.change > 0 else 'fewer'}"
    print(f"pool {pool}: {done.wanted} wanted, {change if done.change else 'no change'}")
    return 0
