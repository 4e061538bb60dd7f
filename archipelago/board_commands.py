"""Commands that compare runs, and those about boards: list, show, save, delete."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from archipelago import terminal
from archipelago.arguments import Subparsers, add_json
from archipelago.board_rows import Board
from archipelago.client import Client
from archipelago.errors import Invalid
from archipelago.rows import RunHeader, RunView, View

R = TypeVar("R", Board, View, RunView)

SHOWN: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "eval_loss": ("EVAL", terminal.loss),
    "best_eval_loss": ("BEST", terminal.loss),
    "train_loss": ("TRAIN", terminal.loss),
    "tokens": ("TOKENS", terminal.count),
    "wall_s": ("TIME", terminal.clock),
    "tokens_per_s": ("TOKENS/S", terminal.count),
    "goodput": ("GOODPUT", terminal.percent),
    "bytes": ("TRAFFIC", terminal.size),
    "cost_usd": ("COST", terminal.money),
}
"""Measures of the table, their heads and formats."""
NAME_LENGTH = 24
"""Characters of a run's name at the head of a column."""


def compare(client: Client, options: argparse.Namespace) -> int:
    """Print the newest results of runs, and the settings in which they differ."""
    runs = dict.fromkeys(client.find(run).id for run in options.run)
    found = client.compare(list(runs))
    if options.json:
        return terminal.print_json(found.raw)
    _print_results(zip(found.runs, found.measures, strict=True))
    print()
    if not found.differences:
        print("no settings differ")
        return 0
    heads = [terminal.safe(run.name)[:NAME_LENGTH] for run in found.runs]
    rows = [
        [each.name, *(terminal.UNKNOWN if v in (None, "") else str(v) for v in each.values)]
        for each in found.differences
    ]
    return terminal.print_table(["SETTING", *heads], rows, right="l" + "r" * len(heads))


def _print_results(results: Iterable[tuple[RunHeader, dict[str, float | None]]]) -> None:
    table = [
        [
            run.id[:8],
            terminal.safe(run.name),
            run.state,
            *(show(values.get(name)) for name, (_, show) in SHOWN.items()),
        ]
        for run, values in results
    ]
    heads = ["RUN", "NAME", "STATE", *(head for head, _ in SHOWN.values())]
    terminal.print_table(heads, table, right="lll" + "r" * len(SHOWN))


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
    return terminal.print_table(["ID", "NAME", "RUNS", "PANELS", "OWNER"], table, right="rllrl")


def show(client: Client, options: argparse.Namespace) -> int:
    """Print the results of the runs of a board."""
    found = client.board(named(client.boards(), options.board, "a board").id)
    if options.json:
        return terminal.print_json(found.raw)
    _print_results((row.run, row.values) for row in found.results)
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
    board = to_delete(client.boards(), options.board, "a board")
    client.delete_board(board.id)
    print(terminal.safe(f"{board.name} deleted"))
    return 0


def named(rows: Sequence[R], wanted: str, kind: str) -> R:
    """The own row with this name, else the row with this id, else another user's with the name."""
    name = " ".join(wanted.split()).lower()
    of_name = [row for row in rows if row.name.lower() == name]
    found = [row for row in of_name if row.mine]
    found += [row for row in rows if str(row.id) == wanted]
    found += of_name
    if not found:
        raise Invalid(f"expected {kind}, found none that matches {wanted!r}")
    return found[0]


def to_delete(rows: Sequence[R], wanted: str, kind: str) -> R:
    """The own row with this name, else the row with this id. A name alone deletes no row of another
    user: an administrator could mistake it for an own one."""
    found = named(rows, wanted, kind)
    if found.mine or str(found.id) == wanted:
        return found
    raise Invalid(
        f"{wanted!r} is {kind} of {found.owner}: expected its id, {found.id}, to delete it"
    )


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


def add_board_commands(commands: Subparsers) -> None:
    """Add the command ``compare`` and those of the group ``boards``."""
    side_by_side = commands.add(
        "compare", compare, "print the newest results of runs, and the settings that differ"
    )
    side_by_side.add_argument("run", metavar="RUN", nargs="+")
    add_json(side_by_side)
    group = commands.group("boards", "saved comparisons")
    ls = group.add("ls", boards, "list boards, own and shared")
    shown = group.add("show", show, "print the results of the runs of a board")
    saved = group.add("save", save, "save a board; an own one of that name is replaced")
    removed = group.add("delete", delete, "delete a board")
    shown.add_argument("board", metavar="BOARD", help="its id or name")
    removed.add_argument("board", metavar="BOARD", help="its id, or the name of an own one")
    for command in (ls, shown):
        add_json(command)
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
