"""Commands about experiment trackers."""

from __future__ import annotations

import argparse

from archipelago import terminal
from archipelago.client import Client


def trackers(client: Client, options: argparse.Namespace) -> int:
    """Print the trackers of the server, or with a run those that it is mirrored to."""
    if options.run is None:
        rows = [
            [t.name, t.kind_label, t.server or "-", t.project or "-", "" if t.enabled else "off"]
            for t in client.trackers()
        ]
        head = ["TRACKER", "KIND", "SERVER", "PROJECT", ""]
    else:
        rows = [
            [m.tracker, m.state, f"{m.points:,}", m.message or m.url or "-"]
            for m in client.mirrors(client.find(options.run).id)
        ]
        head = ["TRACKER", "STATE", "POINTS", "ADDRESS OR ERROR"]
    return terminal.print_table(head, rows)


def mirror(client: Client, options: argparse.Namespace) -> int:
    """Mirror a run to a tracker, or stop that."""
    run = client.find(options.run)
    if options.stop:
        done = client.stop_mirror(run.id, options.tracker)
        state = "stopped" if done.changed else "not mirrored"
    else:
        done = client.mirror(run.id, options.tracker)
        state = "mirrored" if done.changed else "mirrored already"
    print(terminal.safe(f"{run.name} in {options.tracker}: {state}"))
    return 0
