"""The ``archipelago`` command: its arguments, and its error messages.

Results go to standard output, everything else to standard error. :mod:`archipelago.errors` lists
the exit statuses.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from archipelago import (
    fleet_commands,
    read_commands,
    run_commands,
    sweep_commands,
    terminal,
    tracker_commands,
    write_commands,
)
from archipelago.board_commands import add_board_commands
from archipelago.client import POLL_S, Client
from archipelago.errors import ApiError, Invalid, LoginNeeded
from archipelago.evaluation_parser import add_evaluation_commands
from archipelago.frame_parser import (
    add_backend_options,
    add_frame_commands,
    add_inbox_options,
)

TABLES = ("points", "rounds", "contributions", "replicas", "attempts", "events", "logs")
FORMATS = ("csv", "jsonl", "parquet")
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

Command = Callable[[Client, argparse.Namespace], int]
Local = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.local is not None:
            local: Local = options.local
            return local(options)
        command: Command = options.command
        return command(Client.from_login(), options)
    except Invalid as error:
        if error.problems:
            for problem in error.problems:
                where = f"{problem.field}: " if problem.field else ""
                print(terminal.block(f"archipelago: {where}{problem.message}"), file=sys.stderr)
        else:
            print(terminal.block(f"archipelago: {error}"), file=sys.stderr)
        return error.exit_code
    except ApiError as error:
        print(terminal.block(f"archipelago: {error}"), file=sys.stderr)
        if isinstance(error, LoginNeeded) and error.status == 401:
            print("archipelago: sign in again: archipelago login URL", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of the output has closed the pipe (``| head``).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        if options.name_of_command in ("watch", "submit"):
            print("the run continues; stop it with archipelago stop", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(terminal.block(f"archipelago: {error}"), file=sys.stderr)
        return 2


def _version() -> str:
    """Version of the installed distribution; a source tree has none."""
    try:
        return version("archipelago-diloco")
    except PackageNotFoundError:
        return "not installed"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="archipelago",
        description="Manage the runs of an Archipelago server from a terminal.",
        epilog="RUN is an id, the first characters of an id, a name (the newest run with that "
        "name), or `last`.",
    )
    top.add_argument("--version", action="version", version=f"archipelago {_version()}")
    top.set_defaults(local=None)
    commands = Subparsers(top)
    _add_login(commands)
    _add_submit(commands)
    _add_sweeps(commands)
    _add_read_commands(commands)
    _add_fleet_commands(commands)
    add_board_commands(commands)
    _add_write_commands(commands)
    add_frame_commands(commands, _counted)
    _add_tracker_commands(commands)
    add_evaluation_commands(commands, _counted)
    return top


class Subparsers:
    """The commands of the parser."""

    def __init__(self, top: argparse.ArgumentParser, *, dest: str = "name_of_command") -> None:
        self._parsers = top.add_subparsers(required=True, metavar="COMMAND", dest=dest)

    def add(self, name: str, command: Command, help: str) -> argparse.ArgumentParser:
        """A command that calls the server."""
        return self._add(name, help, command=command)

    def add_of_run(self, name: str, command: Command, help: str) -> argparse.ArgumentParser:
        """A command that calls the server and takes a run as its first argument."""
        subparser = self.add(name, command, help)
        subparser.add_argument("run", metavar="RUN")
        return subparser

    def add_local(self, name: str, command: Local, help: str) -> argparse.ArgumentParser:
        """A command that does not need a saved login."""
        return self._add(name, help, local=command)

    def group(self, name: str, help: str) -> Subparsers:
        """Commands of two words, such as ``budgets ls``."""
        return Subparsers(self._add(name, help), dest="name_in_group")

    def _add(self, name: str, help: str, **defaults: Any) -> argparse.ArgumentParser:
        description = f"{help[0].upper()}{help[1:]}."
        subparser = self._parsers.add_parser(name, help=help, description=description)
        subparser.set_defaults(**defaults)
        return subparser


def _add_login(commands: Subparsers) -> None:
    login = commands.add_local(
        "login", write_commands.login, "save the URL of a server and a token for it"
    )
    login.add_argument("url", metavar="URL", help="e.g. https://archipelago.example")
    login.add_argument(
        "--token-stdin", action="store_true", help="read the token from standard input"
    )
    commands.add_local("logout", write_commands.logout, "delete the saved URL and token")
    commands.add("whoami", read_commands.whoami, "show the user and the scopes of the token")


def _add_submit(commands: Subparsers) -> None:
    commands.add_local("example", write_commands.example, "print an example run.toml")
    plan = commands.add(
        "plan", write_commands.plan, "estimate traffic and cost of a run without starting it"
    )
    plan.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    plan.add_argument(
        "--offline", action="store_true", help="skip the checks of backends and bucket"
    )
    submit = commands.add(
        "submit", write_commands.submit, "create a run from a document and launch it"
    )
    submit.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    submit.add_argument("--watch", action="store_true", help="then watch the run until it ends")
    submit.add_argument("--key", help="idempotency key: the same key returns the same run")
    submit.add_argument("-q", "--quiet", action="store_true", help="print only the id")
    _every(submit)
    document = commands.add_of_run(
        "document", read_commands.document, "print the document that creates the same run"
    )
    document.add_argument("--fork", action="store_true", help="start from the newest checkpoint")
    document.add_argument(
        "--round", type=_counted(0, 2**31 - 1), help="start from the checkpoint of this round"
    )
    backends = commands.add(
        "backends", read_commands.backends, "list backends, hardware and prices"
    )
    add_backend_options(backends)
    _json(backends)
    _json(commands.add("settings", read_commands.settings, "list the group settings"))


def _add_sweeps(commands: Subparsers) -> None:
    clone = commands.add_of_run(
        "clone", sweep_commands.clone, "launch the same run again with some fields changed"
    )
    clone.add_argument("--name", help="name of the new run")
    clone.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="e.g. inner_lr=1e-3 or pools.0.count=8; can be repeated",
    )
    sweep = commands.add(
        "sweep", sweep_commands.sweep, "create a run for each combination of values"
    )
    sweep.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    for each in (clone, sweep):
        each.add_argument(
            "--over",
            action="append",
            default=[],
            required=each is sweep,
            metavar="FIELD=VALUES",
            help="e.g. 'inner_lr=1e-4, 1e-3' or 'inner_lr=1e-4..1e-2 x5 log'; can be repeated",
        )
        each.add_argument("--parallel", type=_counted(0, 100), default=0, help="runs at a time")
        each.add_argument("--budget", type=_usd, default=0.0, help="USD of all runs together")
        each.add_argument("--rank", default="eval_loss", metavar="METRIC", help="rank by it")
        each.add_argument("--plan", action="store_true", help="estimate and check only")
        each.add_argument("-q", "--quiet", action="store_true", help="print only the id")
    listed = commands.add("sweeps", sweep_commands.sweeps, "list sweeps, or rank the runs of one")
    listed.add_argument("sweep", nargs="?", metavar="SWEEP", help="id, name or last")
    listed.add_argument("--rank", metavar="METRIC", help="rank by another metric")
    listed.add_argument("-n", "--limit", type=_counted(1, 200), default=20)
    _json(listed)
    stop = commands.add("stop-sweep", sweep_commands.stop_sweep, "stop all runs of a sweep")
    stop.add_argument("sweep", metavar="SWEEP", help="id, name or last")


def _add_read_commands(commands: Subparsers) -> None:
    ls = commands.add("ls", read_commands.ls, "list runs, newest first")
    ls.add_argument("--state", action="append", default=[], choices=STATES)
    ls.add_argument("--owner", default="")
    ls.add_argument("--backend", default="")
    ls.add_argument("--name", default="", help="part of the run's name")
    ls.add_argument("-q", "--query", default="", help="search, e.g. state:running loss<3")
    ls.add_argument("-n", "--limit", type=_counted(1, 200), default=20)
    ls.add_argument("--all", action="store_true", help="list all runs, without a limit")
    ls.add_argument("--group-by", choices=GROUPS, help="print groups with totals")
    _json(ls)
    _json(commands.add_of_run("show", read_commands.show, "show a run, its pools and its replicas"))
    watch = commands.add_of_run("watch", read_commands.watch, "show a run's progress until it ends")
    _every(watch)
    logs = commands.add_of_run("logs", read_commands.logs, "print the logs of the replicas")
    logs.add_argument("-f", "--follow", action="store_true", help="wait for new lines")
    logs.add_argument("-n", "--lines", type=_counted(1, 2000), default=200)
    logs.add_argument("--replica", type=_counted(0, 99_999))
    logs.add_argument("--level", default="", choices=("debug", "info", "warning", "error"))
    logs.add_argument("--grep", default="", metavar="TEXT", help="only lines with this text")
    logs.add_argument(
        "-o", "--output", metavar="FILE", help="write all matching lines; - is standard output"
    )
    logs.add_argument("--format", choices=("txt", "jsonl"), default="txt", help="of --output")
    _every(logs)
    commands.add_of_run("events", read_commands.events, "print the events of a run")
    alerts = commands.add("alerts", read_commands.alerts, "print the alerts of a run, or of all")
    alerts.add_argument("run", metavar="RUN", nargs="?", help="default: all runs")
    add_inbox_options(alerts, _counted)
    findings = commands.add_of_run(
        "findings", run_commands.findings, "print what needs attention in a run"
    )
    _json(findings)
    activity = commands.add_of_run(
        "activity", run_commands.activity, "print the events and alerts of a run, newest first"
    )
    activity.add_argument("--source", default="", choices=("event", "alert"))
    activity.add_argument("--level", default="", choices=("warning", "error"), help="or worse")
    activity.add_argument("--replica", type=_counted(0, 99_999))
    activity.add_argument("--grep", default="", metavar="TEXT", help="only rows with this text")
    activity.add_argument("-n", "--limit", type=_counted(1, 1000), default=50)
    _json(activity)
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
    command.add_argument("--format", choices=FORMATS, default="csv")
    command.add_argument("-o", "--output", metavar="FILE", help="- is standard output")


def _add_fleet_commands(commands: Subparsers) -> None:
    fleet = commands.add("fleet", fleet_commands.fleet, "list live jobs, trouble and orphans")
    fleet.add_argument("--backend", default="")
    fleet.add_argument("--owner", default="")
    fleet.add_argument("--state", default="", help="state of the replica, e.g. computing")
    fleet.add_argument("-n", "--limit", type=_counted(1, 500), default=50)
    fleet.add_argument("--all", action="store_true", help="list all jobs, without a limit")
    _json(fleet)
    spend = commands.add("spend", fleet_commands.spend, "show spending, rate and forecast")
    spend.add_argument("--days", type=_counted(1, 366), help="number of days; default: 7")
    spend.add_argument("--from", dest="first", metavar="DAY", help="e.g. 2026-01-31, in UTC")
    spend.add_argument("--to", dest="last", metavar="DAY", help="default: today")
    spend.add_argument("--by", choices=fleet_commands.GROUPS, default="backend")
    spend.add_argument("--backend", default="")
    spend.add_argument("--owner", default="")
    spend.add_argument("-n", "--limit", type=_counted(1, 1000), default=20)
    _json(spend)


def _add_write_commands(commands: Subparsers) -> None:
    stop = commands.add_of_run(
        "stop", write_commands.stop, "stop a run at its newest round, or stop one replica"
    )
    stop.add_argument("--replica", type=_counted(0, 99_999), help="only this replica")
    stop.add_argument("--force", action="store_true", help="end jobs immediately")
    stop.add_argument("--reason", default="", help="reason shown in the run's events")
    several = commands.add(
        "stop-matching", write_commands.stop_matching, "stop all active runs that match a query"
    )
    several.add_argument("query", metavar="QUERY", help="e.g. 'tag:paper rate>10'")
    several.add_argument(
        "--count",
        type=_counted(1, 500),
        help="number of runs; read from standard input if left out",
    )
    several.add_argument("--reason", default="", help="reason shown in the runs' events")
    commands.add_of_run("pause", write_commands.pause, "save a checkpoint and release the machines")
    commands.add_of_run("resume", write_commands.resume, "resume a paused or failed run")
    commands.add_of_run("save", write_commands.save, "request a checkpoint of the next round")
    describe = commands.add_of_run(
        "describe", write_commands.describe, "set notes and tags, or archive a run"
    )
    describe.add_argument("--notes", metavar="TEXT")
    describe.add_argument(
        "--tag", action="append", metavar="TAG", help="replaces all tags; '' removes them"
    )
    describe.add_argument("--archive", action="store_true", help="hide the run from lists")
    describe.add_argument("--unarchive", action="store_true")
    delete = commands.add_of_run("delete", write_commands.delete, "delete a finished run")
    delete.add_argument("--name", help="the run's name; read from standard input if left out")
    delete.add_argument("--objects", action="store_true", help="also delete its bucket objects")
    restart = commands.add_of_run(
        "restart", write_commands.restart, "restart a replica under the same number"
    )
    restart.add_argument("replica", type=_counted(0, 99_999), metavar="REPLICA")
    restart.add_argument("--force", action="store_true", help="end its job immediately")
    scale = commands.add_of_run(
        "scale", write_commands.scale, "change the number of replicas of a pool"
    )
    scale.add_argument("count", type=_counted(0, 1024), metavar="COUNT")
    scale.add_argument(
        "--pool", type=_counted(0, 2**31 - 1), help="id of the pool, if the run has several"
    )


def _add_tracker_commands(commands: Subparsers) -> None:
    listed = commands.add(
        "trackers", tracker_commands.trackers, "list experiment trackers, or those of a run"
    )
    listed.add_argument("run", metavar="RUN", nargs="?")
    mirror = commands.add_of_run(
        "mirror", tracker_commands.mirror, "mirror the metrics of a run to a tracker"
    )
    mirror.add_argument("tracker", metavar="TRACKER")
    mirror.add_argument("--stop", action="store_true", help="deliver no further points")


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the server's JSON")


def _every(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--every", type=_seconds, default=POLL_S, metavar="SECONDS", help="polling interval"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.2 to 3600 seconds, found {text}")
    return value


def _usd(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"expected dollars, 0 or more, found {text!r}")
    return value


def _counted(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, found {text!r}")
        return int(text)

    return parse
