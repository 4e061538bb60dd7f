"""Arguments of the commands of :mod:`archipelago.frame_commands`."""

from __future__ import annotations

import argparse

from archipelago import frame_commands as commands
from archipelago.arguments import Subparsers, add_json, counted
from archipelago.client import Client
from archipelago.read_commands import backends

ROLES = ("viewer", "operator", "admin")
PERIODS = ("day", "week", "month")


def add_frame_commands(parsers: Subparsers) -> None:
    found = parsers.add("search", commands.search, "find runs, replicas, pages and actions")
    found.add_argument("text", nargs="+", metavar="TEXT", help="e.g. five 3, or stop five")
    found.add_argument("-n", "--limit", type=counted(1, 50), default=12)
    add_json(found)
    _add_budgets(parsers)
    _add_prices(parsers)
    _add_credentials(parsers)
    _add_webhooks(parsers)
    _add_users(parsers)
    tokens = parsers.group("tokens", "list and revoke your API tokens")
    add_json(tokens.add("ls", commands.tokens, "list your tokens"))
    revoke = tokens.add("revoke", commands.revoke_token, "revoke a token")
    revoke.add_argument("id", type=counted(0, 2**31 - 1), metavar="ID")


def add_backend_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--state", action="store_true", help="show the accounts' state instead")
    command.add_argument(
        "--reset", metavar="BACKEND", help="close its circuit breakers, so that launches resume"
    )
    command.add_argument("--credential", metavar="NAME", help="with --reset")
    command.set_defaults(command=_backends)


def _backends(client: Client, options: argparse.Namespace) -> int:
    if options.reset:
        return commands.reset_backend(client, options)
    return (commands.backend_state if options.state else backends)(client, options)


def add_inbox_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--firing", action="store_true", help="only open alerts")
    command.add_argument("--owner", default="", help="only of this owner's runs")
    command.add_argument("-n", "--limit", type=counted(1, 500), default=50)
    command.add_argument("--mark-read", action="store_true", help="mark all alerts as read")
    command.add_argument(
        "--acknowledge",
        action="store_true",
        help="mark the open alerts of RUN as seen by you, who takes care of them",
    )
    add_json(command)


def _add_budgets(parsers: Subparsers) -> None:
    group = parsers.group("budgets", "what owners and tags can spend")
    add_json(group.add("ls", commands.budgets, "list all budgets; exit status 1 if one is spent"))
    change = group.add("set", commands.set_budget, "set a budget")
    delete = group.add("delete", commands.delete_budget, "delete a budget")
    for command in (change, delete):
        command.add_argument("scope", choices=("owner", "tag"))
        command.add_argument("name", metavar="NAME", help="a user name, or a tag")
    change.add_argument("amount", type=float, metavar="USD")
    change.add_argument(
        "--warn-at", type=float, default=80.0, metavar="PERCENT", help="default: 80"
    )
    for command in (change, delete):
        command.add_argument("--period", choices=PERIODS, default="month")


def _add_prices(parsers: Subparsers) -> None:
    group = parsers.group("prices", "prices of hardware and of traffic")
    ls = group.add("ls", commands.prices, "list all prices")
    ls.add_argument("--backend", default="")
    add_json(ls)
    change = group.add("set", commands.set_price, "set prices of hardware, in USD an hour")
    change.add_argument("backend", metavar="BACKEND")
    change.add_argument("hardware", metavar="HARDWARE")
    change.add_argument("price", type=float, nargs="?", metavar="USD", help="on demand")
    change.add_argument("--spot", type=float, metavar="USD")
    change.add_argument("--reset", action="store_true", help="use the catalogue's prices again")
    traffic = group.add("traffic", commands.set_traffic_price, "set what traffic costs")
    traffic.add_argument("scheme", choices=("s3", "gs", "az", "hf"))
    for name, help in (("upload", "USD a GB"), ("download", "USD a GB"), ("requests", "a million")):
        traffic.add_argument(f"--{name}", type=float, default=0.0, metavar="USD", help=help)
    traffic.add_argument("--remove", action="store_true", help="leave traffic out of the cost")


def _add_credentials(parsers: Subparsers) -> None:
    group = parsers.group("credentials", "credentials of backends and buckets")
    add_json(group.add("ls", commands.credentials, "list all credentials, without secrets"))
    add = group.add("add", commands.save_credential, "add a credential")
    rotate = group.add("rotate", commands.save_credential, "replace secrets of a credential")
    test = group.add("test", commands.test_credential, "test a credential")
    delete = group.add("delete", commands.delete_credential, "delete a credential no run uses")
    for command in (add, rotate, test, delete):
        command.add_argument("name", metavar="NAME")
    add.add_argument("--kind", required=True, help="e.g. modal, or s3 for a bucket")
    for command in (add, rotate):
        command.add_argument(
            "--secret",
            action="append",
            default=[],
            metavar="VARIABLE",
            help="its value is read from a prompt or from standard input, one a line",
        )
        command.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="not secret"
        )
    test.add_argument("--uri", default="", help="prefix of a bucket to test with")


def _add_webhooks(parsers: Subparsers) -> None:
    group = parsers.group("webhooks", "addresses that receive alerts")
    add_json(group.add("ls", commands.webhooks, "list all webhooks"))
    add = group.add("add", commands.add_webhook, "add a webhook, and print its secret once")
    test = group.add("test", commands.test_webhook, "send a test message")
    sent = group.add("deliveries", commands.deliveries, "list the newest deliveries")
    delete = group.add("delete", commands.delete_webhook, "delete a webhook")
    for command in (add, test, sent, delete):
        command.add_argument("name", metavar="NAME")
    add.add_argument("url", metavar="URL")
    add.add_argument("--kind", action="append", metavar="KIND", help="of alerts, e.g. finished")


def _add_users(parsers: Subparsers) -> None:
    group = parsers.group("users", "users and their roles")
    ls = group.add("ls", commands.users, "list users")
    ls.add_argument("-q", "--query", default="", help="part of a name")
    add_json(ls)
    add = group.add("add", commands.add_user, "add a user, and print a link for the password")
    role = group.add("role", commands.change_role, "change a user's role")
    reset = group.add("reset", commands.reset_password, "invalidate a password, and print a link")
    deactivate = group.add("deactivate", commands.change_active, "deactivate an account")
    activate = group.add("activate", commands.change_active, "activate an account")
    for command in (add, role, reset, deactivate, activate):
        command.add_argument("name", metavar="NAME")
    add.add_argument("--role", choices=ROLES, default="viewer")
    role.add_argument("role", choices=ROLES)
    deactivate.set_defaults(active=False)
    activate.set_defaults(active=True)
