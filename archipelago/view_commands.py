"""Commands about saved views, of the list of runs and of the run page: list, show, save, delete."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from urllib.parse import urlencode

from archipelago import terminal
from archipelago.arguments import Subparsers, add_json
from archipelago.board_commands import named, to_delete
from archipelago.client import Client
from archipelago.read_parser import GROUPS
from archipelago.rows import RunView, View

NEWEST = "-created"
AXES = ("step", "round", "tokens", "wall", "relative")


def views(client: Client, options: argparse.Namespace) -> int:
    """List the views of the list of runs."""
    return _list(client.views(), options)


def run_views(client: Client, options: argparse.Namespace) -> int:
    """List the views of the run page."""
    return _list(client.run_views(), options)


def _list(rows: Sequence[View | RunView], options: argparse.Namespace) -> int:
    if options.json:
        return terminal.print_json([row.raw for row in rows])
    table = [
        [str(row.id), row.name, _content(row), f"{row.owner}{', shared' if row.shared else ''}"]
        for row in rows
    ]
    return terminal.print_table(["ID", "NAME", "SHOWS", "OWNER"], table, right="rlll")


def show(client: Client, options: argparse.Namespace) -> int:
    """Print what a view of the list has."""
    return _show(client, named(client.views(), options.view, "a view"), options)


def show_run_view(client: Client, options: argparse.Namespace) -> int:
    """Print what a view of the run page has."""
    return _show(client, named(client.run_views(), options.view, "a view of runs"), options)


def _show(client: Client, view: View | RunView, options: argparse.Namespace) -> int:
    if options.json:
        return terminal.print_json(view.raw)
    values = {
        name: ",".join(value) if isinstance(value, list) else str(value)
        for name, value in view.raw.items()
        if value not in (None, "", [])
    }
    terminal.print_facts(values)
    page = "/" if isinstance(view, View) else "/runs/ID/"
    print(f"{client.url}{page}?{_content(view)}", file=sys.stderr)
    return 0


def _content(view: View | RunView) -> str:
    """The address of the page with the view, without its path."""
    if isinstance(view, View):
        values = {
            "q": view.query,
            "sort": "" if view.sort == NEWEST else view.sort,
            "columns": ",".join(view.columns),
            "differ": "1" if view.differing else "",
            "group": view.group,
        }
    else:
        values = {
            "panels": view.panels,
            "x": view.x,
            "smooth": "" if view.smooth is None else f"{view.smooth:g}",
            "log": view.log,
            "clip": "" if view.clip is None else str(int(view.clip)),
        }
    return urlencode({name: value for name, value in values.items() if value}, safe=",:!<>=")


def save(client: Client, options: argparse.Namespace) -> int:
    """Save a view of the list; an own one of that name is replaced."""
    body = {
        "name": options.name,
        "query": options.query,
        "sort": options.sort,
        "columns": [name for name in options.columns.split(",") if name],
        "differing": options.differing,
        "group": options.group_by,
        "shared": options.shared,
    }
    return _saved(client.save_view(body))


def save_run_view(client: Client, options: argparse.Namespace) -> int:
    """Save a view of the run page; an own one of that name is replaced."""
    body = {name: getattr(options, name) for name in ("name", "panels", "x", "smooth", "log")}
    return _saved(client.save_run_view({**body, "clip": options.clip, "shared": options.shared}))


def _saved(view: View | RunView) -> int:
    print(terminal.safe(f"{view.name}  {_content(view)}"))
    return 0


def delete(client: Client, options: argparse.Namespace) -> int:
    view = to_delete(client.views(), options.view, "a view")
    client.delete_view(view.id)
    return _deleted(view)


def delete_run_view(client: Client, options: argparse.Namespace) -> int:
    view = to_delete(client.run_views(), options.view, "a view of runs")
    client.delete_run_view(view.id)
    return _deleted(view)


def _deleted(view: View | RunView) -> int:
    print(terminal.safe(f"{view.name} deleted"))
    return 0


def add_view_commands(commands: Subparsers) -> None:
    """Add the commands of the groups ``views`` and ``run-views``."""
    group = commands.group("views", "saved views of the list of runs")
    add_json(group.add("ls", views, "list views of the list of runs, own and shared"))
    shown = group.add("show", show, "print what a view has, and its address")
    saved = group.add("save", save, "save a view; an own one of that name is replaced")
    removed = group.add("delete", delete, "delete a view")
    _add_names(shown, saved, removed)
    saved.add_argument("-q", "--query", default="", help="search, e.g. state:running loss<3")
    saved.add_argument("--sort", default=NEWEST, help="e.g. --sort=-cost; default: newest first")
    saved.add_argument("--columns", default="", metavar="A,B", help="default: the usual ones")
    saved.add_argument(
        "--differing", action="store_true", help="add the settings in which the runs differ"
    )
    saved.add_argument("--group-by", choices=GROUPS, default="", help="show groups with totals")
    group = commands.group("run-views", "saved views of the run page")
    add_json(group.add("ls", run_views, "list views of the run page, own and shared"))
    shown = group.add("show", show_run_view, "print what a view has, and its address")
    saved = group.add("save", save_run_view, "save a view; an own one of that name is replaced")
    removed = group.add("delete", delete_run_view, "delete a view")
    _add_names(shown, saved, removed)
    saved.add_argument("--panels", default="", help="e.g. loss.l,m:grad_norm.s!,-cosine")
    saved.add_argument("--x", choices=AXES, default=AXES[0], help="default: step")
    saved.add_argument("--smooth", type=float, metavar="NUMBER", help="0 to 0.98")
    saved.add_argument("--log", choices=("x", "y", "xy"), default="", help="logarithmic axes")
    saved.add_argument(
        "--clip", action=argparse.BooleanOptionalAction, help="clip outliers; default: after NaN"
    )


def _add_names(
    shown: argparse.ArgumentParser,
    saved: argparse.ArgumentParser,
    removed: argparse.ArgumentParser,
) -> None:
    shown.add_argument("view", metavar="VIEW", help="its id or name")
    removed.add_argument("view", metavar="VIEW", help="its id, or the name of an own one")
    add_json(shown)
    saved.add_argument("name", metavar="NAME")
    saved.add_argument("--shared", action="store_true", help="share it with all users")
