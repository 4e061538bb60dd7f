"""Methods of the client for what belongs to no single run: alerts, search, settings, comparisons,
boards, saved views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from archipelago.board_rows import Board, BoardResults, Comparison
from archipelago.errors import NotFound
from archipelago.frame_rows import (
    BackendState,
    Budget,
    Credential,
    Delivery,
    Found,
    Inbox,
    NewWebhook,
    Person,
    PersonLink,
    Prices,
    Token,
    Webhook,
)
from archipelago.rows import RunView, View
from archipelago.transport import Http


class FrameClient:
    """Base of :class:`archipelago.client.Client`. Settings need an administrator, whose token has
    the scope ``admin``."""

    _http: Http

    def inbox(
        self,
        *,
        firing: bool = False,
        kind: str = "",
        owner: str = "",
        before: str | None = None,
        limit: int = 50,
    ) -> Inbox:
        """One page of the alerts of all runs, the newest first."""
        query = {"kind": kind, "owner": owner, "before": before, "limit": limit}
        return Inbox.of(self._get("/alerts", firing="true" if firing else "false", **query))

    def mark_alerts_read(self) -> int:
        """Mark all alerts as read. Returns the number that is still unread."""
        return int(self._send("POST", "/alerts/read", {})["unread"])

    def search(self, text: str, *, limit: int = 12) -> list[Found]:
        """Runs, replicas, pages and actions that match some typed characters."""
        return [Found.of(row) for row in self._get("/search", q=text, limit=limit)["found"]]

    def budgets(self) -> list[Budget]:
        return [Budget.of(row) for row in self._get("/budgets")]

    def set_budget(
        self, scope: str, name: str, amount_usd: float, *, period: str, warn_at: float
    ) -> Budget:
        """Set the budget of an owner or a tag; one of the same period is changed."""
        body = {
            "scope": scope,
            "name": name,
            "period": period,
            "amount_usd": amount_usd,
            "warn_at": warn_at,
        }
        known = [b for b in self.budgets() if (b.scope, b.name, b.period) == (scope, name, period)]
        if known:
            return Budget.of(self._send("PUT", f"/budgets/{known[0].id}", body))
        return Budget.of(self._send("POST", "/budgets", body))

    def delete_budget(self, scope: str, name: str, *, period: str) -> list[Budget]:
        for budget in self.budgets():
            if (budget.scope, budget.name, budget.period) == (scope, name, period):
                left = self._send("DELETE", f"/budgets/{budget.id}")
                return [Budget.of(row) for row in left]
        raise NotFound(f"expected a budget of {scope} {name} a {period}, found none")

    def prices(self) -> Prices:
        return Prices.of(self._get("/prices"))

    def set_price(
        self, backend: str, hardware: str, *, price_usd_h: float | None, spot_usd_h: float | None
    ) -> None:
        """Set prices of hardware; None keeps that of the catalogue."""
        body = {"price_usd_h": price_usd_h, "spot_price_usd_h": spot_usd_h}
        self._send("PUT", f"/prices/hardware/{quote(backend)}/{quote(hardware, safe='')}", body)

    def set_traffic_price(self, scheme: str, prices: Mapping[str, float] | None) -> Prices:
        """Set what traffic with a kind of bucket costs; None leaves it out of the cost."""
        path = f"/prices/traffic/{quote(scheme)}"
        answer = self._send("DELETE", path) if prices is None else self._send("PUT", path, prices)
        return Prices.of(answer)

    def backend_state(self) -> list[BackendState]:
        return [BackendState.of(row) for row in self._get("/backends/state")]

    def reset_backend(self, backend: str, *, credential: str | None = None) -> int:
        """Close the circuit breakers of an account. Returns the number of pools."""
        body = {"backend": backend, "credential": credential}
        return int(self._send("POST", "/backends/reset", body)["pools"])

    def credentials(self) -> list[Credential]:
        return [Credential.of(row) for row in self._get("/credentials")]

    def save_credential(
        self,
        name: str,
        *,
        kind: str = "",
        secrets: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> Credential:
        """Add a credential of a ``kind``, or without one change that with the name: options that
        are not given, and the restrictions, stay."""
        body: dict[str, Any] = {"name": name, "secrets": dict(secrets)}
        if kind:
            body |= {"kind": kind, "options": dict(options)}
            return Credential.of(self._send("POST", "/credentials", body))
        known = self._named(self.credentials(), name)
        body["options"] = {k: v for k, v in known.options.items() if k != "scheme"} | dict(options)
        body["allowed_pool_options"] = dict(known.allowed_pool_options)
        return Credential.of(self._send("PUT", f"/credentials/{known.id}", body))

    def test_credential(self, name: str, *, uri: str = "") -> tuple[bool, str]:
        """Whether it works, and the identity or the error."""
        known = self._named(self.credentials(), name)
        answer = self._send("POST", f"/credentials/{known.id}/test", {"uri": uri})
        return bool(answer["ok"]), str(answer["message"])

    def delete_credential(self, name: str) -> None:
        self._send("DELETE", f"/credentials/{self._named(self.credentials(), name).id}")

    def webhooks(self) -> list[Webhook]:
        return [Webhook.of(row) for row in self._get("/webhooks")]

    def add_webhook(self, name: str, url: str, *, kinds: Sequence[str] | None) -> NewWebhook:
        """Add a webhook; the answer has its secret, which is not shown again."""
        body: dict[str, Any] = {"name": name, "url": url}
        if kinds is not None:
            body["kinds"] = [*kinds]
        return NewWebhook.of(self._send("POST", "/webhooks", body))

    def test_webhook(self, name: str) -> Delivery:
        known = self._named(self.webhooks(), name)
        return Delivery.of(self._send("POST", f"/webhooks/{known.id}/test", {}))

    def deliveries(self, name: str) -> list[Delivery]:
        known = self._named(self.webhooks(), name)
        return [Delivery.of(row) for row in self._get(f"/webhooks/{known.id}/deliveries")]

    def delete_webhook(self, name: str) -> None:
        self._send("DELETE", f"/webhooks/{self._named(self.webhooks(), name).id}")

    def users(self, *, query: str = "") -> list[Person]:
        return [Person.of(row) for row in self._get("/users", q=query)]

    def add_user(self, name: str, *, role: str) -> PersonLink:
        """Add a user; the answer has the link that sets the password."""
        return PersonLink.of(self._send("POST", "/users", {"name": name, "role": role}))

    def change_user(
        self, name: str, *, role: str | None = None, active: bool | None = None
    ) -> Person:
        body = {"role": role, "active": active}
        given = {field: value for field, value in body.items() if value is not None}
        return Person.of(self._send("PATCH", f"/users/{quote(name, safe='')}", given))

    def reset_password(self, name: str) -> PersonLink:
        return PersonLink.of(self._send("POST", f"/users/{quote(name, safe='')}/reset", {}))

    def tokens(self) -> list[Token]:
        """The caller's own tokens."""
        return [Token.of(row) for row in self._get("/tokens")]

    def revoke_token(self, token_id: int) -> None:
        self._send("DELETE", f"/tokens/{int(token_id)}")

    @staticmethod
    def _named(rows: Sequence[Any], name: str) -> Any:
        for row in rows:
            if row.name == name:
                return row
        raise NotFound(f"expected the name of one, found {name!r}")

    def boards(self) -> list[Board]:
        """The user's own boards and shared ones."""
        return [Board.of(row) for row in self._get("/boards")["boards"]]

    def board(self, board_id: int) -> BoardResults:
        """A board with the results of its runs."""
        return BoardResults.of(self._get(f"/boards/{board_id}"))

    def save_board(self, body: Mapping[str, Any]) -> Board:
        """Save a board; an own one with the same name is replaced."""
        return Board.of(self._save("/boards", self.boards(), body))

    def delete_board(self, board_id: int) -> None:
        self._send("DELETE", f"/boards/{board_id}")

    def compare(self, runs: Sequence[str]) -> Comparison:
        """Results of up to twenty runs, and the settings in which they differ."""
        return Comparison.of(self._get("/compare", id=list(runs)))

    def views(self) -> list[View]:
        """Saved views of the list of runs, own and shared."""
        return [View.of(row) for row in self._get("/views")["views"]]

    def save_view(self, body: Mapping[str, Any]) -> View:
        """Save a view of the list; an own one with the same name is replaced."""
        return View.of(self._save("/views", self.views(), body))

    def delete_view(self, view_id: int) -> None:
        self._send("DELETE", f"/views/{view_id}")

    def run_views(self) -> list[RunView]:
        """Saved views of the run page, own and shared."""
        return [RunView.of(row) for row in self._get("/run-views")["views"]]

    def save_run_view(self, body: Mapping[str, Any]) -> RunView:
        """Save a view of the run page; an own one with the same name is replaced."""
        return RunView.of(self._save("/run-views", self.run_views(), body))

    def delete_run_view(self, view_id: int) -> None:
        self._send("DELETE", f"/run-views/{view_id}")

    def _save(self, path: str, rows: Sequence[Any], body: Mapping[str, Any]) -> Any:
        """Create a row, or replace the own one of ``rows`` with the same name."""
        name = " ".join(str(body["name"]).split()).lower()  # as the server keeps it
        for row in rows:
            if row.mine and row.name.lower() == name:
                return self._send("PUT", f"{path}/{row.id}", body)
        return self._send("POST", path, body)

    def _get(self, path: str, **query: Any) -> Any:
        return self._http.call("GET", path, query=query)[1]

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._http.call(method, path, body=None if body is None else dict(body))[1]
