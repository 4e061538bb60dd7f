"""Commands about no single run: alerts of all runs, search, and the settings of the server."""

from __future__ import annotations

import argparse
import getpass
import sys
from typing import Any

from archipelago import terminal
from archipelago.client import Client


def inbox(client: Client, options: argparse.Namespace) -> int:
    """Print alerts of all runs. Exit status 1 if one fires that no user has acknowledged."""
    if options.acknowledge:
        raise ValueError("expected RUN, whose alerts --acknowledge marks as seen, found none")
    if options.mark_read:
        client.mark_alerts_read()
        print("all alerts are marked as read")
        return 0
    page = client.inbox(firing=options.firing, owner=options.owner, limit=options.limit)
    if options.json:
        return terminal.print_json(page.raw)
    colour = terminal.has_colour(sys.stdout)
    for alert in page.alerts:
        state = "over" if alert.closed_at else "firing"
        where = (
            f"{alert.run_name} ({alert.run[:8]})" if alert.run and alert.run_name else "all runs"
        )
        by = f", acknowledged by {alert.acknowledged_by}" if alert.acknowledged_by else ""
        mark = "*" if alert.unread else " "
        at = terminal.local_time(alert.opened_at)
        text = f"{mark} {at}  {state:<6}  {where}: {alert.title}: {alert.message}{by}"
        level = "" if alert.closed_at else alert.level
        print(terminal.painted(terminal.block(text), level, colour=colour))
    print(f"{page.firing} firing, {page.unread} unread", file=sys.stderr)
    return 1 if any(not a.closed_at and not a.acknowledged_by for a in page.alerts) else 0


def search(client: Client, options: argparse.Namespace) -> int:
    found = client.search(" ".join(options.text), limit=options.limit)
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [row.kind, row.label, row.state or terminal.UNKNOWN, row.detail, f"{client.url}{row.url}"]
        for row in found
    ]
    return terminal.print_table(
        ["KIND", "NAME", "STATE", "DETAIL", "URL"], rows, "lllll", "nothing matches"
    )


def budgets(client: Client, options: argparse.Namespace) -> int:
    """Print all budgets. Exit status 1 if one is spent, for scripts."""
    found = client.budgets()
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [
            row.scope,
            row.name,
            row.period,
            terminal.money(row.spent_usd, known=not row.unpriced_jobs),
            terminal.money(row.amount_usd),
            terminal.percent(row.share),
            row.state,
            row.last,
        ]
        for row in found
    ]
    heads = ["FOR", "NAME", "PERIOD", "SPENT", "AMOUNT", "USED", "STATE", "UNTIL"]
    terminal.print_table(heads, rows, "lllrrrll", "no budgets")
    return 1 if any(row.state == "exceeded" for row in found) else 0


def set_budget(client: Client, options: argparse.Namespace) -> int:
    row = client.set_budget(
        options.scope,
        options.name,
        options.amount,
        period=options.period,
        warn_at=options.warn_at / 100,
    )
    amount = terminal.money(row.amount_usd)
    print(terminal.safe(f"budget of {row.scope} {row.name}: {amount} a {row.period}"))
    return 0


def delete_budget(client: Client, options: argparse.Namespace) -> int:
    client.delete_budget(options.scope, options.name, period=options.period)
    print(terminal.safe(f"budget of {options.scope} {options.name} deleted"))
    return 0


def prices(client: Client, options: argparse.Namespace) -> int:
    found = client.prices()
    if options.json:
        return terminal.print_json(found.raw)
    rows = [
        [
            row.backend,
            row.hardware,
            terminal.money(row.price_usd_h),
            terminal.money(row.spot_price_usd_h),
            row.source,
        ]
        for row in found.hardware
        if options.backend in ("", row.backend)
    ]
    terminal.print_table(
        ["BACKEND", "HARDWARE", "PRICE/H", "SPOT/H", "SOURCE"], rows, "llrrl", "no hardware"
    )
    for price in found.traffic:
        print(
            f"traffic of {price.scheme}://: ${price.upload_usd_gb:g} up and "
            f"${price.download_usd_gb:g} down a GB, ${price.requests_usd_million:g} a million "
            "requests"
        )
    return 0


def set_price(client: Client, options: argparse.Namespace) -> int:
    if options.reset == (options.price is not None or options.spot is not None):
        raise ValueError("expected a price, --spot or --reset, found none or several")
    client.set_price(
        options.backend, options.hardware, price_usd_h=options.price, spot_usd_h=options.spot
    )
    print("saved; the next launches use it")
    return 0


def set_traffic_price(client: Client, options: argparse.Namespace) -> int:
    prices = {
        "upload_usd_gb": options.upload,
        "download_usd_gb": options.download,
        "requests_usd_million": options.requests,
    }
    client.set_traffic_price(options.scheme, None if options.remove else prices)
    print("saved" if not options.remove else "no longer part of the cost")
    return 0


def backend_state(client: Client, options: argparse.Namespace) -> int:
    found = client.backend_state()
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [
            row.backend,
            row.credential or terminal.UNKNOWN,
            row.state.replace("_", " "),
            f"{row.live}/{row.replicas}",
            str(row.waiting),
            row.message.split("\n", 1)[0][:80],
        ]
        for row in found
    ]
    heads = ["BACKEND", "CREDENTIAL", "STATE", "LIVE", "WAITING", "MESSAGE"]
    return terminal.print_table(heads, rows, "lllrrl", "no active run uses a backend")


def reset_backend(client: Client, options: argparse.Namespace) -> int:
    pools = client.reset_backend(options.reset, credential=options.credential)
    print(f"launches of {pools} pools reset")
    return 0


def credentials(client: Client, options: argparse.Namespace) -> int:
    found = client.credentials()
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [
            row.name,
            row.label,
            ", ".join(row.fields),
            "not tested" if row.test_ok is None else "works" if row.test_ok else "fails",
            str(row.runs),
        ]
        for row in found
    ]
    return terminal.print_table(
        ["NAME", "KIND", "HOLDS", "TEST", "RUNS"], rows, "llllr", "no credentials"
    )


def save_credential(client: Client, options: argparse.Namespace) -> int:
    """Add or rotate a credential. Each value of ``--secret NAME`` is read from a prompt, or line by
    line from standard input, so that none enters the shell history."""
    secrets = {name: _secret(name) for name in options.secret}
    given = dict(_pair(text) for text in options.option)
    kind = getattr(options, "kind", "")
    row = client.save_credential(options.name, kind=kind, secrets=secrets, options=given)
    print(terminal.safe(f"{row.name}: holds {', '.join(row.fields) or 'nothing'}; test it"))
    return 0


def _secret(name: str) -> str:
    if sys.stdin.isatty():
        value = getpass.getpass(f"{name}: ").strip()
    else:
        value = sys.stdin.readline().rstrip("\n")
    if not value:
        raise ValueError(f"expected a value for {name}, found none")
    return value


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def test_credential(client: Client, options: argparse.Namespace) -> int:
    ok, message = client.test_credential(options.name, uri=options.uri)
    print(terminal.block(f"{options.name}: {'works' if ok else 'fails'}: {message}"))
    return 0 if ok else 1


def delete_credential(client: Client, options: argparse.Namespace) -> int:
    client.delete_credential(options.name)
    print(terminal.safe(f"{options.name} deleted"))
    return 0


def webhooks(client: Client, options: argparse.Namespace) -> int:
    found = client.webhooks()
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [row.name, row.url, "on" if row.enabled else "off", row.last_state, ",".join(row.kinds)]
        for row in found
    ]
    return terminal.print_table(
        ["NAME", "URL", "STATE", "LAST", "KINDS"], rows, "lllll", "no webhooks"
    )


def add_webhook(client: Client, options: argparse.Namespace) -> int:
    row = client.add_webhook(options.name, options.url, kinds=options.kind or None)
    print("Copy the secret now. It won't be shown again:", file=sys.stderr)
    print(terminal.safe(row.secret))
    return 0


def test_webhook(client: Client, options: argparse.Namespace) -> int:
    client.test_webhook(options.name)
    print("test sent; see: archipelago webhooks deliveries", terminal.safe(options.name))
    return 0


def deliveries(client: Client, options: argparse.Namespace) -> int:
    rows = [
        [
            terminal.local_time(row.created_at),
            row.kind,
            row.state,
            str(row.attempts),
            str(row.status or terminal.UNKNOWN),
            row.message.split("\n", 1)[0][:80],
        ]
        for row in client.deliveries(options.name)
    ]
    heads = ["SENT", "KIND", "STATE", "TRIES", "STATUS", "ANSWER"]
    return terminal.print_table(heads, rows, "lllrrl", "no deliveries")


def delete_webhook(client: Client, options: argparse.Namespace) -> int:
    client.delete_webhook(options.name)
    print(terminal.safe(f"{options.name} deleted"))
    return 0


def users(client: Client, options: argparse.Namespace) -> int:
    found = client.users(query=options.query)
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [
            row.name,
            row.role or "no role",
            "invited" if row.invited else "active" if row.active else "deactivated",
            str(row.runs),
        ]
        for row in found
    ]
    return terminal.print_table(["NAME", "ROLE", "STATE", "RUNS"], rows, "lllr", "no users")


def add_user(client: Client, options: argparse.Namespace) -> int:
    return _link(client.add_user(options.name, role=options.role).link)


def reset_password(client: Client, options: argparse.Namespace) -> int:
    return _link(client.reset_password(options.name).link)


def _link(link: str) -> int:
    print("Send this link to the user only; it sets the password, once:", file=sys.stderr)
    print(terminal.safe(link))
    return 0


def change_role(client: Client, options: argparse.Namespace) -> int:
    row = client.change_user(options.name, role=options.role)
    print(terminal.safe(f"{row.name}: {row.role}"))
    return 0


def change_active(client: Client, options: argparse.Namespace) -> int:
    row = client.change_user(options.name, active=options.active)
    print(terminal.safe(f"{row.name}: {'active' if row.active else 'deactivated'}"))
    return 0


def tokens(client: Client, options: argparse.Namespace) -> int:
    found = client.tokens()
    if options.json:
        return terminal.print_json([row.raw for row in found])
    rows = [
        [str(t.id), t.name, f"{t.hint}…", ",".join(t.scopes), (t.expires_at or "never")[:10]]
        for t in found
    ]
    return terminal.print_table(
        ["ID", "NAME", "TOKEN", "SCOPES", "EXPIRES"], rows, "rllll", "no tokens"
    )


def revoke_token(client: Client, options: argparse.Namespace) -> int:
    client.revoke_token(options.id)
    print("revoked")
    return 0
