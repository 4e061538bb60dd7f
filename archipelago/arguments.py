"""Parsers of commands, and the options and values that several of them have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from archipelago.client import POLL_S, Client

Command = Callable[[Client, argparse.Namespace], int]
Local = Callable[[argparse.Namespace], int]


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


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the server's JSON")


def add_every(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--every", type=seconds, default=POLL_S, metavar="SECONDS", help="polling interval"
    )


def seconds(text: str) -> float:
    value = float(text)
    if not 0.2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.2 to 3600 seconds, found {text}")
    return value


def usd(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"expected dollars, 0 or more, found {text!r}")
    return value


def counted(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, found {text!r}")
        return int(text)

    return parse
