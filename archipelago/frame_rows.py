"""Rows of what belongs to no single run: alerts of all runs, search, settings; see
:mod:`archipelago.rows`."""

from __future__ import annotations

from dataclasses import dataclass

from archipelago.rows import Alert, Row


@dataclass(frozen=True, kw_only=True)
class InboxAlert(Alert):
    """An alert of any run. ``run`` is None if several runs share its cause. ``unread``: it opened
    after the caller last read the alerts, and no user has acknowledged it."""

    run: str | None
    run_name: str | None
    owner: str | None
    unread: bool


@dataclass(frozen=True, kw_only=True)
class AlertKind(Row):
    kind: str
    title: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Inbox(Row):
    """A page of alerts, the newest first. ``next`` is ``before`` of the next page. ``unread``
    counts at most 100; ``firing`` alerts are open, and ``kinds`` counts them by kind."""

    alerts: list[InboxAlert]
    next: str | None
    unread: int
    firing: int
    kinds: list[AlertKind]


@dataclass(frozen=True, kw_only=True)
class Found(Row):
    """A result of the search. ``kind`` is run, replica, page or action; ``url`` is relative to the
    server."""

    kind: str
    label: str
    detail: str
    url: str
    state: str


@dataclass(frozen=True, kw_only=True)
class FoundPage(Row):
    found: list[Found]


@dataclass(frozen=True, kw_only=True)
class Budget(Row):
    """Limit of spending of the runs of an owner, or with a tag, a day, week or month (in UTC).

    ``state`` is ok, warning (``share`` has reached ``warn_at``) or exceeded: nothing is launched.
    ``unpriced_jobs`` have no known price, and are missing in ``spent_usd``.
    """

    id: int
    scope: str
    name: str
    period: str
    amount_usd: float
    warn_at: float
    spent_usd: float
    share: float
    state: str
    unpriced_jobs: int
    first: str
    last: str
    evaluated_at: str | None


@dataclass(frozen=True, kw_only=True)
class Price(Row):
    """Prices of one replica an hour. ``source`` is ``list`` (read on ``read_on``), ``file`` (that
    of the deployment) or ``settings``: ``set_…`` are then the values that were entered."""

    backend: str
    backend_label: str
    hardware: str
    label: str
    price_usd_h: float | None
    spot_price_usd_h: float | None
    source: str
    read_on: str
    set_price_usd_h: float | None
    set_spot_price_usd_h: float | None
    default_usd_h: float | None
    default_spot_usd_h: float | None


@dataclass(frozen=True, kw_only=True)
class TrafficPrice(Row):
    """Prices of traffic with buckets of a scheme, for estimates. A GB is 10^9 bytes."""

    scheme: str
    upload_usd_gb: float
    download_usd_gb: float
    requests_usd_million: float


@dataclass(frozen=True, kw_only=True)
class Prices(Row):
    hardware: list[Price]
    traffic: list[TrafficPrice]


@dataclass(frozen=True, kw_only=True)
class Credential(Row):
    """A credential. Its secrets are never shown: ``fields`` are the names of those stored."""

    id: int
    name: str
    kind: str
    label: str
    fields: list[str]
    options: dict[str, object]
    allowed_pool_options: dict[str, object]
    created_at: str | None
    changed_at: str | None
    tested_at: str | None
    test_ok: bool | None
    test_message: str
    runs: int


@dataclass(frozen=True, kw_only=True)
class Webhook(Row):
    """``deliveries_failed`` of the last 30 days; ``last_*`` describe the newest delivery."""

    id: int
    name: str
    url: str
    kinds: list[str]
    enabled: bool
    created_at: str | None
    deliveries_failed: int
    last_state: str
    last_at: str | None
    last_message: str


@dataclass(frozen=True, kw_only=True)
class NewWebhook(Webhook):
    """``secret`` signs its deliveries. It is not shown again."""

    secret: str


@dataclass(frozen=True, kw_only=True)
class Delivery(Row):
    id: str
    webhook: str
    kind: str
    state: str
    attempts: int
    created_at: str | None
    tried_at: str | None
    next_at: str | None
    status: int | None
    message: str


@dataclass(frozen=True, kw_only=True)
class Person(Row):
    name: str
    role: str
    active: bool
    invited: bool
    last_sign_in: str | None
    runs: int


@dataclass(frozen=True, kw_only=True)
class PersonLink(Person):
    """``link`` sets the password of the account; it works once and is not shown again."""

    link: str


@dataclass(frozen=True, kw_only=True)
class Token(Row):
    id: int
    name: str
    hint: str
    scopes: list[str]
    created_at: str | None
    expires_at: str | None
    last_used_at: str | None


@dataclass(frozen=True, kw_only=True)
class BackendState(Row):
    """An account of a backend, as active runs use it. ``state`` is the worst of its pools:
    healthy, failing, open, half_open, action_required, price_limit, budget or waiting."""

    backend: str
    label: str
    credential: str | None
    state: str
    message: str
    advice: str
    open_until: str | None
    pools: int
    replicas: int
    live: int
    waiting: int
    usd_h: float | None
    unanswered: int
    unanswered_message: str
