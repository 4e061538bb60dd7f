"""Commands about all runs together: fleet, spend."""

from __future__ import annotations

import argparse
import sys

from archipelago import files, terminal
from archipelago.client import Client
from archipelago.fleet_rows import FleetPage, JobSum, LiveJob, Spend, SpendGroup

MOST = 500
"""Jobs of one request."""
GROUPS = ("backend", "owner", "run", "tag", "day")


def fleet(client: Client, options: argparse.Namespace) -> int:
    filters = {"backend": options.backend, "owner": options.owner, "state": options.state}
    page = client.fleet(limit=MOST if options.all else options.limit, **filters)
    jobs = list(client.every_job(page, limit=MOST, **filters)) if options.all else page.jobs
    if options.json:
        whole = {**page.raw, "jobs": [job.raw for job in jobs]}
        if options.all:
            whole["next"] = None
        return terminal.print_json(whole)
    _print_jobs(jobs)
    if len(jobs) < page.total.jobs:
        print(f"the first {len(jobs)} of {page.total.jobs} jobs", file=sys.stderr)
    _print_sums(page)
    for pool in page.pools:
        where = f"{pool.name} of {pool.run_name} ({pool.run[:8]})"
        waits = f", {pool.waiting} waiting for {', '.join(pool.pending)}" if pool.waiting else ""
        state = pool.state.replace("_", " ")
        print(terminal.block(f"{where}: {state}{waits}: {pool.message}".rstrip(": ")))
    for job in page.orphans:
        bill = terminal.money(job.cost_usd)
        text = f"orphaned job {job.launch_key} on {job.backend}: {job.reason}, bill {bill}"
        print(terminal.block(text))
    return 0


def _print_jobs(jobs: list[LiveJob]) -> None:
    if not jobs:
        print("no live jobs", file=sys.stderr)
        return
    rows = [
        [
            job.run[:8],
            str(job.replica),
            job.run_name,
            job.owner,
            job.state if job.started_at or not job.pending else f"{job.state} ({job.pending})",
            job.backend,
            f"{job.hardware}{' spot' if job.spot else ''}",
            job.region or terminal.UNKNOWN,
            terminal.age(job.started_at or job.launched_at or job.created_at),
            terminal.money(job.price_usd_h),
        ]
        for job in jobs
    ]
    heads = ["RUN", "REPLICA", "NAME", "OWNER", "STATE", "BACKEND", "HARDWARE", "REGION"]
    terminal.print_table([*heads, "SINCE", "PRICE/H"], rows, right="lrllllllrr")
    print()


def _print_sums(page: FleetPage) -> None:
    sums = [(row.label, row) for row in page.backends]
    rows = [
        [label, str(row.jobs), str(row.running), rate(row)]
        for label, row in [*sums, ("total", page.total)]
    ]
    terminal.print_table(["BACKEND", "JOBS", "RUNNING", "RATE/H"], rows, right="lrrr")


def rate(row: JobSum) -> str:
    return terminal.money(row.usd_h, known=not row.unpriced)


def spend(client: Client, options: argparse.Namespace) -> int:
    if options.days is not None and options.first:
        raise ValueError("expected --days or --from, found both")
    asked = {
        "first": options.first,
        "last": options.last,
        "days": options.days,
        "backend": options.backend,
        "owner": options.owner,
    }
    if options.format or options.output:
        if options.json:
            raise ValueError("expected --json or a file, found both")
        if options.by:
            raise ValueError("expected --by or a file, found both: a file has all groups")
        output = options.output or "-"
        suffix = output.rpartition(".")[2]
        format = options.format or (suffix if suffix in files.FORMATS else "csv")
        return files.save(client.spend_file(format, **asked), output)
    result = client.spend(limit=options.limit, **asked)
    if options.json:
        return terminal.print_json(result.raw)
    known = not result.month_unpriced
    summary = {
        f"{result.first} to {result.last}": _usd(result.total),
        "rate now": f"{rate(result.now)} an hour",
        "this month": terminal.money(result.month_usd, known=known),
        "forecast": terminal.money(result.forecast_usd, known=known and not result.now.unpriced),
    }
    terminal.print_facts(summary)
    print()
    _print_groups(result, options.by or "backend")
    if result.total.unpriced_jobs:
        print(
            f"jobs without a known price, whose cost is missing: {result.total.unpriced_jobs}",
            file=sys.stderr,
        )
    if not result.complete:
        print("incomplete: only the newest jobs were counted", file=sys.stderr)
    return 0


def _print_groups(result: Spend, by: str) -> int:
    if by == "day":
        rows = [[day.day, terminal.money(day.usd, known=not day.unpriced_s)] for day in result.days]
        return terminal.print_table(["DAY", "SPENT"], rows, right="lr")
    groups = {
        "backend": result.backends,
        "owner": result.owners,
        "run": result.runs,
        "tag": result.tags,
    }[by]
    rows = [[_name(group, by), str(group.jobs), _usd(group)] for group in groups]
    return terminal.print_table([by.upper(), "JOBS", "SPENT"], rows, right="lrr")


def _name(group: SpendGroup, by: str) -> str:
    if group.others:
        return f"{group.others} others"
    if by == "run":
        return f"{group.key[:8]} {group.label}{' (deleted)' if group.deleted else ''}"
    return group.label or "no tag"


def _usd(group: SpendGroup) -> str:
    return terminal.money(group.usd, known=not group.unpriced_jobs)
