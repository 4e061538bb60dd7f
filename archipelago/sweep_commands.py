"""Commands that make runs from others: clone with changes, and sweeps over values of fields."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from archipelago import terminal
from archipelago.client import Client
from archipelago.documents import read_document, with_code
from archipelago.errors import Invalid
from archipelago.sweep_rows import RankedSweep, Sweep
from archipelago.write_commands import print_problems


def clone(client: Client, options: argparse.Namespace) -> int:
    """Clone a run with the fields of ``--set`` changed; with ``--over``, as a sweep."""
    run = client.find(options.run)
    document = client.document(run.id)
    if options.name:
        document["name"] = options.name
    for given in options.set:
        field, value = _assignment(given)
        before = set_field(document, field, value)
        line = f"{field}: {json.dumps(before)} -> {json.dumps(value)}"
        print(terminal.safe(line), file=sys.stderr)
    if options.over:
        return _sweep(client, document, options)
    if options.plan:
        return print_problems(client.plan(document)["problems"])
    created = client.submit(document)
    print(
        created.id
        if options.quiet
        else terminal.safe(f"{created.name}  {client.url}/runs/{created.id}/")
    )
    return 0


def sweep(client: Client, options: argparse.Namespace) -> int:
    """Create a run for each combination of the values of ``--over``."""
    document = with_code(client, read_document(options.file), options.file)
    return _sweep(client, document, options)


def _sweep(client: Client, document: dict[str, Any], options: argparse.Namespace) -> int:
    body = {
        "run": document,
        "parameters": [_parameter(given) for given in options.over],
        "metric": options.rank,
        "parallel": options.parallel,
        "budget_usd": options.budget,
    }
    if options.plan:
        plan = client.plan_sweep(body)
        estimate = {
            "runs": terminal.count(plan["runs"]),
            "tokens": terminal.count(plan["tokens"]),
            "total cost": terminal.money(plan["usd"]),
            "hours": terminal.UNKNOWN if plan["hours"] is None else f"{plan['hours']:.1f}",
        }
        terminal.print_facts(estimate)
        return print_problems(plan["problems"])
    created = client.sweep(body)
    if options.quiet:
        print(created.sweep.id)
    else:
        _print(client, created)
    return 0


def sweeps(client: Client, options: argparse.Namespace) -> int:
    """List sweeps, or show the runs of one, the best first."""
    if options.sweep is None:
        page = client.sweeps(limit=options.limit)
        if options.json:
            return terminal.print_json([row.raw for row in page.sweeps])
        rows = [_row(row) for row in page.sweeps]
        heads = ["SWEEP", "NAME", "RUNS", "ACTIVE", "HELD", "ENDED", "COST"]
        return terminal.print_table(heads, rows, right="llrrrrr")
    ranked = client.ranked_sweep(_find(client, options.sweep), metric=options.rank)
    if options.json:
        return terminal.print_json(ranked.raw)
    _print(client, ranked)
    return 0


def stop_sweep(client: Client, options: argparse.Namespace) -> int:
    """Stop all runs of a sweep."""
    stopped = client.stop_sweep(_find(client, options.sweep))
    print(f"{stopped} run{'' if stopped == 1 else 's'} stopped")
    return 0


def set_field(document: dict[str, Any], field: str, value: Any) -> Any:
    """Set a field such as ``settings.inner_lr`` or ``pools.0.count`` and return its earlier value.
    A name without a dot that is not a field of the document is a group setting."""
    path = field.split(".")
    if len(path) == 1 and field not in document and field in document.get("settings", {}):
        path = ["settings", field]
    part: Any = document
    try:
        for name in path[:-1]:
            part = part[int(name)] if isinstance(part, list) else part[name]
        key: Any = int(path[-1]) if isinstance(part, list) else path[-1]
        before = part.get(key) if isinstance(part, dict) else part[key]
        if not isinstance(part, dict | list) or (before is None and key not in part):
            raise KeyError(key)
        part[key] = value
    except (KeyError, IndexError, TypeError, ValueError):
        raise Invalid(f"expected a field of the document, found {field!r}") from None
    return before


def _assignment(text: str) -> tuple[str, Any]:
    field, sign, value = text.partition("=")
    if not sign or not field.strip():
        raise Invalid(f"expected FIELD=VALUE, found {text!r}")
    try:
        return field.strip(), json.loads(value)
    except ValueError:
        return field.strip(), value.strip()


def _parameter(text: str) -> dict[str, str]:
    field, sign, values = text.partition("=")
    if not sign or not field.strip() or not values.strip():
        raise Invalid(f"expected FIELD=VALUES, found {text!r}")
    return {"field": field.strip(), "values": values.strip()}


def _find(client: Client, wanted: str) -> str:
    """The id of a sweep given by id, first characters of it, name, or ``last``."""
    rows = client.sweeps(limit=200).sweeps
    if wanted == "last" and rows:
        return rows[0].id
    matches = [row for row in rows if row.name == wanted][:1] or [
        row for row in rows if len(wanted) >= 4 and row.id.startswith(wanted.lower())
    ]
    if len(matches) == 1:
        return matches[0].id
    if len(wanted) == 36 and not matches:
        return wanted
    raise Invalid(f"expected one sweep, found {len(matches)} that match {wanted!r}")


def _row(row: Sweep) -> list[str]:
    cost = terminal.money(row.cost_usd, known=row.cost_known)
    counts = [str(value) for value in (row.runs, row.active, row.held, row.ended)]
    return [row.id[:8], terminal.safe(row.name), *counts, cost]


def _print(client: Client, ranked: RankedSweep) -> None:
    fields = ranked.sweep.parameters
    heads = ["RANK", ranked.metric.upper(), *(f.field.rpartition(".")[2].upper() for f in fields)]
    rows = [
        [
            terminal.UNKNOWN if row.rank is None else str(row.rank),
            terminal.UNKNOWN if row.value is None else f"{row.value:.6g}",
            *(terminal.safe(str(row.values.get(f.field, terminal.UNKNOWN))) for f in fields),
            "held" if row.held else row.run.state,
            row.run.id[:8],
        ]
        for row in ranked.runs
    ]
    terminal.print_table([*heads, "STATE", "RUN"], rows, right="rr" + "r" * len(fields) + "ll")
    print(f"{client.url}/sweeps/{ranked.sweep.id}", file=sys.stderr)
