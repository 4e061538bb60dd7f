"""Commands about one run as the run page shows it: findings, activity, log files."""

from __future__ import annotations

import argparse
import sys

from archipelago import files, terminal
from archipelago.client import Client
from archipelago.rows import RunHeader

FILE_LEVELS = ("", "warning", "error")
"""Levels that a log file can be filtered by."""


def findings(client: Client, options: argparse.Namespace) -> int:
    """Print the findings. Exit status 1 if one of them is an error, for scripts."""
    rows = client.findings(client.find(options.run).id)
    if options.json:
        terminal.print_json([row.raw for row in rows])
    else:
        colour = terminal.has_colour(sys.stdout)
        for row in rows:
            detail = f" ({row.detail})" if row.detail else ""
            text = terminal.block(f"{row.level:<7}  {row.message}{detail}")
            print(terminal.painted(text, row.level, colour=colour))
        if not rows:
            print("no findings", file=sys.stderr)
    return 1 if any(row.level == "error" for row in rows) else 0


def activity(client: Client, options: argparse.Namespace) -> int:
    rows = client.activity(
        client.find(options.run).id,
        source=options.source,
        level=options.level,
        replica=options.replica,
        text=options.grep,
        limit=options.limit,
    )
    if options.json:
        return terminal.print_json([row.raw for row in rows])
    colour = terminal.has_colour(sys.stdout)
    for row in rows:
        who = "" if row.replica is None else f"replica {row.replica}: "
        title = f"{row.title}: " if row.title else ""
        by = f" ({row.actor})" if row.actor else ""
        state = " [open]" if row.source == "alert" and not row.closed_at else ""
        message = row.message or row.to_state
        at = terminal.local_time(row.at)
        text = terminal.block(f"{at}  {row.source:<5}  {who}{title}{message}{by}{state}")
        print(terminal.painted(text, row.level, colour=colour))
    return 0


def save_logs(client: Client, run: RunHeader, options: argparse.Namespace) -> int:
    """Write all matching log lines to a file."""
    if options.level not in FILE_LEVELS:
        raise ValueError(f"expected --level warning or error with --output, found {options.level}")
    if options.follow:
        raise ValueError("expected --follow or --output, found both")
    chunks = client.log_file(
        run.id,
        options.format,
        replica=options.replica,
        level=options.level,
        text=options.grep,
    )
    return files.save(chunks, options.output)
