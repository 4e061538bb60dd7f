"""The ``archipelago`` command: what it takes, and what it says when something is wrong.

Answers go to standard output, everything else to standard error. Statuses are in
:mod:`archipelago.errors`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from archipelago import acting, looking, terminal
from archipelago.client import POLL_S, Client
from archipelago.errors import ApiError, Invalid, LoginNeeded

TABLES = ("points", "rounds", "contributions", "replicas", "attempts", "events", "logs")
FORMATS = ("csv", "jsonl", "parquet")
STATES = (
    "queued", "provisioning", "running", "degraded", "stalled", "pausing", "paused", "stopping",
    "succeeded", "failed", "cancelled",
)  # fmt: skip

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
        # Whoever read our output has had enough (``| head``).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        if options.name_of_command in ("watch", "submit"):
            print("the run goes on; archipelago stop ends it", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(terminal.block(f"archipelago: {error}"), file=sys.stderr)
        return 2


def _version() -> str:
    """Of the installed distribution; that of the source tree where it is not installed."""
    try:
        return version("archipelago-diloco")
    except PackageNotFoundError:
        return "0.1.0 (not installed)"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="archipelago",
        description="Runs of an Archipelago server, without a browser.",
        epilog="RUN is an id, the beginning of one, a name (the newest so called) or `last`.",
    )
    top.add_argument("--version", action="version", version=f"archipelago {_version()}")
    top.set_defaults(local=None)
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="name_of_command")

    def add(name: str, command: Command, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        made.set_defaults(command=command)
        return made

    def add_local(name: str, command: Local, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        made.set_defaults(local=command)
        return made

    login = add_local("login", acting.login, "keep a server's address and a token for it")
    login.add_argument("url", metavar="URL", help="such as https://archipelago.example")
    login.add_argument("--token-stdin", action="store_true", help="read the token there")
    add_local("logout", acting.logout, "forget them")
    add("whoami", looking.whoami, "say who the token belongs to")

    add_local("example", acting.example, "print a run.toml to begin with")
    plan = add("plan", acting.plan, "say what a run would move and cost; start nothing")
    plan.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    plan.add_argument("--offline", action="store_true", help="ask no backend and no bucket")
    submit = add("submit", acting.submit, "make a run of a document and launch it")
    submit.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    submit.add_argument("--watch", action="store_true", help="and watch it to its end")
    submit.add_argument("--key", help="sent again with the same key it is the same run")
    submit.add_argument("-q", "--quiet", action="store_true", help="print the id alone")
    _every(submit)

    ls = add("ls", looking.ls, "list runs, newest first")
    ls.add_argument("--state", action="append", default=[], choices=STATES)
    ls.add_argument("--owner", default="")
    ls.add_argument("--backend", default="")
    ls.add_argument("--name", default="", help="any part of it")
    ls.add_argument("-q", "--query", default="", help="as in the list: state:running loss<3")
    ls.add_argument("-n", "--limit", type=_counted(1, 200), default=20)
    ls.add_argument("--all", action="store_true", help="however many there are")
    show = add("show", looking.show, "show a run, its pools and its replicas")
    watch = add("watch", looking.watch, "show a run's progress until it is over")
    _every(watch)
    logs = add("logs", looking.logs, "print what replicas wrote")
    logs.add_argument("-f", "--follow", action="store_true", help="and what comes, to the end")
    logs.add_argument("-n", "--lines", type=_counted(1, 2000), default=200)
    logs.add_argument("--replica", type=_counted(0, 99_999))
    logs.add_argument("--level", default="", choices=("debug", "info", "warning", "error"))
    logs.add_argument("--grep", default="", metavar="TEXT", help="lines with this in them")
    _every(logs)
    events = add("events", looking.events, "print what happened: who, when, why")
    alerts = add("alerts", looking.alerts, "print what deserves attention")
    document = add("document", looking.document, "print what another such run is made of")
    document.add_argument("--fork", action="store_true", help="with its newest checkpoint")
    document.add_argument("--round", type=_counted(0, 2**31 - 1), help="with this checkpoint")
    export = add("export", looking.export, "write every row of a table into a file")
    stop = add("stop", acting.stop, "end a run at its newest round, or let a replica leave")
    stop.add_argument("--replica", type=_counted(0, 99_999), help="only this one")
    stop.add_argument("--force", action="store_true", help="end jobs at once")
    stop.add_argument("--reason", default="", help="for the run's events")
    pause = add("pause", acting.pause, "save and release the machines until it is resumed")
    resume = add("resume", acting.resume, "go on with what is paused, or ended too early")
    save = add("save", acting.save, "ask for a checkpoint of the next round")
    describe = add("describe", acting.describe, "set notes and tags, or archive")
    describe.add_argument("--notes", metavar="TEXT")
    describe.add_argument("--tag", action="append", metavar="TAG", help="in place of all; '': none")
    describe.add_argument("--archive", action="store_true", help="leave it out of lists")
    describe.add_argument("--unarchive", action="store_true")
    delete = add("delete", acting.delete, "delete a run that is over")
    delete.add_argument("--name", help="the run's; asked for if it is not given")
    delete.add_argument("--objects", action="store_true", help="and what is in its bucket")
    restart = add("restart", acting.restart, "launch a replica anew, under its number")
    scale = add("scale", acting.scale, "make a pool of replicas larger or smaller")
    for made in (
        show, watch, logs, events, alerts, document, export,
        stop, pause, resume, save, describe, delete, restart, scale,
    ):  # fmt: skip
        made.add_argument("run", metavar="RUN")
    export.add_argument("table", choices=TABLES)
    export.add_argument("--format", choices=FORMATS, default="csv")
    export.add_argument("-o", "--output", metavar="FILE", help="- is standard output")
    restart.add_argument("replica", type=_counted(0, 99_999), metavar="REPLICA")
    restart.add_argument("--force", action="store_true", help="end its job at once")
    scale.add_argument("count", type=_counted(0, 1024), metavar="COUNT")
    scale.add_argument("--pool", type=_counted(0, 2**31 - 1), help="its id, if there are several")

    backends = add("backends", looking.backends, "list backends, hardware and prices")
    settings = add("settings", looking.settings, "list the group settings and their defaults")
    for made in (ls, show, backends, settings):
        made.add_argument("--json", action="store_true", help="as the server says it")
    return top


def _every(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--every", type=_seconds, default=POLL_S, metavar="SECONDS", help="between two looks"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.2 to 3600 seconds, found {text}")
    return value


def _counted(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, found {text!r}")
        return int(text)

    return parse
