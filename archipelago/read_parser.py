"""Arguments of the commands that show runs, the fleet and spending."""

from __future__ import annotations

import argparse

from archipelago import files, fleet_commands, read_commands, run_commands
from archipelago.arguments import Subparsers, add_every, add_json, counted
from archipelago.frame_parser import add_inbox_options

TABLES = ("points", "rounds", "contributions", "replicas", "attempts", "events", "logs")
GROUPS = ("tag", "owner", "sweep", "state", "backend")
STATES = (
    "queued",
    "provisioning",
    "running",
    "degraded",
    "stalled",
    "pausing",
    "paused",
    "stopping",
    "succeeded",
    "failed",
    "cancelled",
)


def add_read_commands(commands: Subparsers) -> None:
    ls = commands.add("ls", read_commands.ls, "list runs, newest first")
    ls.add_argument("--state", action="append", default=[], choices=STATES)
    ls.add_argument("--owner", default="")
    ls.add_argument("--backend", default="")
    ls.add_argument("--name", default="", help="part of the run's name")
    ls.add_argument("-q", "--query", default="", help="search, e.g. state:running loss<3")
    ls.add_argument("-n", "--limit", type=counted(1, 200), default=20)
    ls.add_argument("--all", action="store_true", help="list all runs, without a limit")
    sums = ls.add_mutually_exclusive_group()
    sums.add_argument("--group-by", choices=GROUPS, help="print groups with totals")
    sums.add_argument(
        "--totals", action="store_true", help="print what all matching runs use and cost"
    )
    add_json(ls)
    add_json(
        commands.add_of_run("show", read_commands.show, "show a run, its pools and its replicas")
    )
    watch = commands.add_of_run("watch", read_commands.watch, "show a run's progress until it ends")
    add_every(watch)
    logs = commands.add_of_run("logs", read_commands.logs, "print the logs of the replicas")
    logs.add_argument("-f", "--follow", action="store_true", help="wait for new lines")
    logs.add_argument("-n", "--lines", type=counted(1, 2000), default=200)
    logs.add_argument("--replica", type=counted(0, 99_999))
    logs.add_argument("--level", default="", choices=("debug", "info", "warning", "error"))
    logs.add_argument("--grep", default="", metavar="TEXT", help="only lines with this text")
    logs.add_argument(
        "-o", "--output", metavar="FILE", help="write all matching lines; - is standard output"
    )
    logs.add_argument("--format", choices=("txt", "jsonl"), default="txt", help="of --output")
    add_every(logs)
    commands.add_of_run("events", read_commands.events, "print the events of a run")
    alerts = commands.add("alerts", read_commands.alerts, "print the alerts of a run, or of all")
    alerts.add_argument("run", metavar="RUN", nargs="?", help="default: all runs")
    add_inbox_options(alerts)
    findings = commands.add_of_run(
        "findings", run_commands.findings, "print what needs attention in a run"
    )
    add_json(findings)
    activity = commands.add_of_run(
        "activity", run_commands.activity, "print the events and alerts of a run, newest first"
    )
    activity.add_argument("--source", default="", choices=("event", "alert"))
    activity.add_argument("--level", default="", choices=("warning", "error"), help="or worse")
    activity.add_argument("--replica", type=counted(0, 99_999))
    activity.add_argument("--grep", default="", metavar="TEXT", help="only rows with this text")
    activity.add_argument("-n", "--limit", type=counted(1, 1000), default=50)
    add_json(activity)
    export = commands.add_of_run(
        "export", read_commands.export, "write all rows of a table to a file"
    )
    export.add_argument("table", choices=TABLES)
    _file_options(export)
    listed = commands.add(
        "export-runs", read_commands.export_runs, "write one row per run to a file"
    )
    listed.add_argument("-q", "--query", default="", help="search, e.g. state:running loss<3")
    _file_options(listed)


def _file_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=files.FORMATS, default="csv")
    command.add_argument("-o", "--output", metavar="FILE", help="- is standard output")


def add_fleet_commands(commands: Subparsers) -> None:
    fleet = commands.add("fleet", fleet_commands.fleet, "list live jobs, trouble and orphans")
    fleet.add_argument("--backend", default="")
    fleet.add_argument("--owner", default="")
    fleet.add_argument("--state", default="", help="state of the replica, e.g. computing")
    fleet.add_argument("-n", "--limit", type=counted(1, 500), default=50)
    fleet.add_argument("--all", action="store_true", help="list all jobs, without a limit")
    add_json(fleet)
    spend = commands.add("spend", fleet_commands.spend, "show spending, rate and forecast")
    spend.add_argument("--days", type=counted(1, 366), help="number of days; default: 7")
    spend.add_argument("--from", dest="first", metavar="DAY", help="e.g. 2026-01-31, in UTC")
    spend.add_argument("--to", dest="last", metavar="DAY", help="default: today")
    spend.add_argument("--by", choices=fleet_commands.GROUPS, help="default: backend")
    spend.add_argument("--backend", default="")
    spend.add_argument("--owner", default="")
    spend.add_argument("-n", "--limit", type=counted(1, 1000), default=20)
    add_json(spend)
    spend.add_argument("--format", choices=files.FORMATS, help="print all rows in this format")
    spend.add_argument(
        "-o", "--output", metavar="FILE", help="write all rows, in the format of its suffix"
    )
