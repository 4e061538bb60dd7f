"""Rows of the settings: credentials, webhooks, users, tokens, and the state of backends.

Secrets are in none of them. Every function makes a constant number of queries, and returns a
bounded number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Count, Q, Sum

from archipelago import frame_rows
from executors.registry import BACKENDS
from runs.backends import shared_breakers
from runs.credentials.kinds import kind_of
from runs.json_values import finite, iso, json_value, mapping, row_of, texts
from runs.models import (
    ApiToken,
    Credential,
    Replica,
    ReplicaAttempt,
    ReplicaPool,
    Run,
    Webhook,
    WebhookDelivery,
)
from runs.queries.fleet import breaker_row
from runs.queries.fleet_trouble import WAITS
from runs.states import REPLICA_ENDED, REPLICA_LIVE, RUN_ACTIVE

MOST = 1000
"""Rows of one table."""
MOST_POOLS = 5000
WORST = (
    "action_required",
    "open",
    "half_open",
    "failing",
    "price_limit",
    "budget",
    "waiting",
    "healthy",
)
"""States of an account, the worst first."""


def credential_rows(credentials: Iterable[Credential] | None = None) -> list[dict[str, Any]]:
    """Rows of all credentials by kind and name, or of some. Three queries."""
    found = list(Credential.objects.all()[:MOST] if credentials is None else credentials)
    used: Counter[int] = Counter()
    stores = Run.objects.filter(store_credential__isnull=False).values_list("store_credential")
    for pk, number in stores.order_by().annotate(n=Count("pk")):
        used[pk] += number
    pools = ReplicaPool.objects.filter(credential__isnull=False).values_list("credential")
    for pk, number in pools.order_by().annotate(n=Count("run", distinct=True)):
        used[pk] += number
    return [_credential_row(credential, used[credential.pk]) for credential in found]


def _credential_row(credential: Credential, runs: int) -> dict[str, Any]:
    kind = kind_of(credential)
    return row_of(
        frame_rows.Credential,
        credential,
        label=kind.label if kind else credential.kind,
        fields=texts(credential.fields),
        options=dict(mapping(credential.options)),
        allowed_pool_options=dict(mapping(credential.allowed_pool_options)),
        runs=runs,
    )


def credential(credential_id: int) -> Credential | None:
    return Credential.objects.filter(pk=credential_id).first()


def credential_named(name: str) -> Credential | None:
    return Credential.objects.filter(name=name).first()


def webhook_rows() -> list[dict[str, Any]]:
    """Rows of all webhooks by name. Three queries."""
    hooks = list(Webhook.objects.all()[:MOST])
    failed = dict(
        WebhookDelivery.objects.filter(state="failed")
        .order_by()
        .values_list("webhook")
        .annotate(n=Count("pk"))
    )
    newest: dict[int, WebhookDelivery] = {}
    for delivery in WebhookDelivery.objects.defer("body").order_by("-created_at", "-id")[:MOST]:
        newest.setdefault(delivery.webhook_id, delivery)
    return [webhook_row(hook, failed.get(hook.pk, 0), newest.get(hook.pk)) for hook in hooks]


def webhook_row(
    hook: Webhook, failed: int = 0, last: WebhookDelivery | None = None
) -> dict[str, Any]:
    return row_of(
        frame_rows.Webhook,
        hook,
        kinds=texts(hook.kinds),
        deliveries_failed=failed,
        last_state=last.state if last else "",
        last_at=iso(last.tried_at or last.created_at) if last else None,
        last_message=last.message if last else "",
    )


def webhook(webhook_id: int) -> Webhook | None:
    return Webhook.objects.filter(pk=webhook_id).first()


def delivery_rows(hook: Webhook | None = None, *, limit: int = 50) -> list[dict[str, Any]]:
    """The newest deliveries, of one webhook or of all. One query."""
    deliveries = WebhookDelivery.objects.select_related("webhook").defer("body")
    if hook is not None:
        deliveries = deliveries.filter(webhook=hook)
    return [delivery_row(delivery) for delivery in deliveries[:limit]]


def delivery_row(delivery: WebhookDelivery) -> dict[str, Any]:
    return row_of(frame_rows.Delivery, delivery, id=str(delivery.pk), webhook=delivery.webhook.name)


def delivery(delivery_id: Any) -> WebhookDelivery | None:
    return WebhookDelivery.objects.select_related("webhook").filter(pk=delivery_id).first()


def person_row(person: User, *, role: str) -> dict[str, Any]:
    """Row of a user of :func:`runs.actions.users.users`."""
    return {
        "name": person.get_username(),
        "role": role,
        "active": person.is_active,
        "invited": person.is_active and not person.has_usable_password(),
        "last_sign_in": iso(person.last_login),
        "runs": getattr(person, "run_count", 0),
    }


def person(name: str) -> User | None:
    return User.objects.filter(username=name).first()


def token_rows(tokens: Iterable[ApiToken]) -> list[dict[str, Any]]:
    return [row_of(frame_rows.Token, token, scopes=texts(token.scopes)) for token in tokens]


def backend_rows() -> list[dict[str, Any]]:
    """Rows of the accounts that active runs use, the worst first. Four queries, and one call of the
    broker for each account."""
    pools = list(
        ReplicaPool.objects.filter(run__state__in=sorted(RUN_ACTIVE))
        .select_related("credential")
        .order_by("-id")[:MOST_POOLS]
    )
    replicas = _replicas()
    rates = dict(
        ReplicaAttempt.objects.filter(ended_at=None, started_at__isnull=False)
        .order_by()
        .values_list("replica__pool")
        .annotate(usd_h=Sum("price_usd_h"))
    )
    accounts: dict[tuple[str, int | None], list[ReplicaPool]] = {}
    for pool in pools:
        accounts.setdefault((pool.backend, pool.credential_id), []).append(pool)
    rows = [_backend_row(group, replicas, rates) for group in accounts.values()]
    return sorted(rows, key=_badness)


def _badness(row: dict[str, Any]) -> tuple[int, str, str]:
    return WORST.index(row["state"]), row["label"], row["credential"] or ""


def _replicas() -> dict[int, dict[str, Any]]:
    """Replicas of the pools of active runs: all, live, and those that wait for capacity."""
    waits = Q(pending_cause__in=WAITS) & ~Q(state__in=REPLICA_ENDED)
    rows = (
        Replica.objects.filter(run__state__in=sorted(RUN_ACTIVE))
        .exclude(state__in=REPLICA_ENDED)
        .order_by()
        .values("pool_id")
        .annotate(
            all=Count("id"),
            live=Count("id", filter=Q(state__in=REPLICA_LIVE)),
            waiting=Count("id", filter=waits),
        )
    )
    return {row["pool_id"]: {**row} for row in rows}


def _backend_row(
    pools: list[ReplicaPool], replicas: dict[int, dict[str, Any]], rates: dict[int, float | None]
) -> dict[str, Any]:
    counts = {
        name: sum(replicas.get(pool.pk, {}).get(name, 0) for pool in pools)
        for name in ("all", "live", "waiting")
    }
    breakers = [breaker_row(pool) for pool in pools]
    worst = min(breakers, key=lambda row: WORST.index(row["state"]))
    state = worst["state"]
    if state == "healthy" and counts["waiting"]:
        state = "waiting"
    first = pools[0]
    place = shared_breakers.state_of(shared_breakers.account_place(first))
    known = [rate for pool in pools if (rate := rates.get(pool.pk)) is not None]
    return {
        "backend": first.backend,
        "label": BACKENDS.get(first.backend, first.backend),
        "credential": first.credential.name if first.credential else None,
        "state": state,
        "message": worst["last_error"],
        "advice": worst["advice"],
        "open_until": worst["open_until"],
        "pools": len(pools),
        "replicas": counts["all"],
        "live": counts["live"],
        "waiting": counts["waiting"],
        "usd_h": finite(sum(known)) if known else None,
        "unanswered": place.failures,
        "unanswered_message": json_value(place.message),
    }
