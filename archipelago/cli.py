"""The ``archipelago`` command: its arguments, and its error messages.

Results go to standard output, everything else to standard error. :mod:`archipelago.errors` lists
the exit statuses.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from archipelago import read_commands, terminal, write_commands
from archipelago.arguments import Command, Local, Subparsers
from archipelago.board_commands import add_board_commands
from archipelago.client import Client
from archipelago.errors import ApiError, Invalid, LoginNeeded
from archipelago.evaluation_parser import add_evaluation_commands
from archipelago.frame_parser import add_frame_commands
from archipelago.read_parser import add_fleet_commands, add_read_commands
from archipelago.view_commands import add_view_commands
from archipelago.write_parser import (
    add_submit_commands,
    add_sweep_commands,
    add_tracker_commands,
    add_write_commands,
)


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
    add_submit_commands(commands)
    add_sweep_commands(commands)
    add_read_commands(commands)
    add_fleet_commands(commands)
    add_board_commands(commands)
    add_view_commands(commands)
    add_write_commands(commands)
    add_frame_commands(commands)
    add_tracker_commands(commands)
    add_evaluation_commands(commands)
    return top


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
