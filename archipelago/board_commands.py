"""Commands about boards: list, show, save, delete."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from archipelago import terminal
from archipelago.board_rows import Board
from archipelago.client import Client
from archipelago.errors import Invalid

SHOWN = {"eval_loss": "EVAL", "train_loss": "TRAIN", "tokens": "TOKENS", "cost_usd": "COST"}
"""Measures of the table and their heads."""


def boards(client: Client, options: argparse.Namespace) -> int:
    """List boards, own and shared."""
    rows = client.boards()
    if options.json:
        return terminal.print_json([row.raw for row in rows])
    table = [
        [
            str(row.id),
            terminal.safe(row.name),
            f"{len(row.runs)} chosen" if row.runs else terminal.safe(row.query),
            str(len(row.panels)),
            f"{row.owner}{', shared' if row.shared else ''}",
        ]
        for row in rows
    ]
    for line in terminal.table(["ID", "NAME", "RUNS", "PANELS", "OWNER"], table, right="rllrl"):
        print(line)
    return 0


def show(client: Client, options: argparse.Namespace) -> int:
    """Print the results of the runs of a board."""
    found = client.board(_find(client, options.board).id)
    if options.json:
        return terminal.print_json(found.raw)
    table = [
        [
            row.run.id[:8],
            terminal.safe(row.run.name),
            row.run.state,
            *(_value(name, row.values.get(name)) for name in SHOWN),
        ]
        for row in found.results
    ]
    for line in terminal.table(["RUN", "NAME", "STATE", *SHOWN.values()], table, right="lllrrrr"):
        print(line)
    print(f"{client.url}/boards/{found.board.id}", file=sys.stderr)
    return 0


def save(client: Client, options: argparse.Namespace) -> int:
    """Save a board; an own one of that name is replaced."""
    body = {
        "name": options.name,
        "runs": [client.find(run).id for run in options.run],
        "query": options.query,
        "panels": [_panel(text) for text in options.panel],
        "shared": options.shared,
    }
    saved = client.save_board(body)
    print(terminal.safe(f"{saved.name}  {client.url}/boards/{saved.id}"))
    return 0


def delete(client: Client, options: argparse.Namespace) -> int:
    board = _find(client, options.board)
    client.delete_board(board.id)
    print(terminal.safe(f"{board.name} deleted"))
    return 0


def _find(client: Client, wanted: str) -> Board:
    """The board with this id or name; of several with the name the own one."""
    rows = client.boards()
    found = [row for row in rows if str(row.id) == wanted] or sorted(
        (row for row in rows if row.name.lower() == wanted.lower()), key=lambda row: not row.mine
    )
    if not found:
        raise Invalid(f"expected a board, found none that matches {wanted!r}")
    return found[0]


def _panel(text: str) -> dict[str, Any]:
    """A panel such as ``loss,x=wall,smooth=0.6,log``."""
    metric, *rest = [part.strip() for part in text.split(",")]
    panel: dict[str, Any] = {"metric": metric}
    for part in rest:
        name, sign, value = part.partition("=")
        if name == "log" and not sign:
            panel["log"] = True
        elif name == "x" and sign:
            panel["x"] = value
        elif name == "smooth" and sign:
            try:
                panel["smooth"] = float(value)
            except ValueError:
                raise Invalid(f"expected a number after smooth=, found {value!r}") from None
        else:
            raise Invalid(f"expected METRIC,x=AXIS,smooth=NUMBER,log, found {part!r}")
    return panel


def _value(name: str, value: float | None) -> str:
    formats = {"tokens": terminal.count, "cost_usd": terminal.money}
    return formats.get(name, terminal.loss)(value)


def add_board_commands(commands: Any) -> None:
    """Add the commands of the group ``boards``."""
    group = commands.group("boards", "saved comparisons")
    ls = group.add("ls", boards, "list boards, own and shared")
    shown = group.add("show", show, "print the results of the runs of a board")
    saved = group.add("save", save, "save a board; an own one of that name is replaced")
    removed = group.add("delete", delete, "delete a board")
    for command in (shown, removed):
        command.add_argument("board", metavar="BOARD", help="its id or name")
    for command in (ls, shown):
        command.add_argument("--json", action="store_true", help="print JSON")
    saved.add_argument("name", metavar="NAME")
    saved.add_argument("-q", "--query", default="", help="show the newest runs that match")
    saved.add_argument(
        "--run", action="append", default=[], metavar="RUN", help="show this run; repeatable"
    )
    saved.add_argument(
        "--panel",
        action="append",
        default=[],
        metavar="PANEL",
        help="METRIC,x=AXIS,smooth=NUMBER,log; repeatable; default: the losses",
    )
    saved.add_argument("--shared", action="store_true", help="share it with all users")
