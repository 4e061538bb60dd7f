"""Read-only tables in the admin, with a few actions.

No row can be edited, added or deleted: rows are written by actions with their Event, or read from
the bucket, and a manual change would be undone or would falsify the record. Admin actions call the
same functions as the pages. Permissions come from :func:`runs.permissions.has_role`, not from
Django's model permissions, so that staff who only view cannot stop a run.
"""

from __future__ import annotations

from django.contrib import admin, messages
from django.contrib.auth import admin as auth_admin  # noqa: F401 -- registers users and groups
from django.contrib.auth.models import Group, User
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils import timezone

from runs.actions import api_tokens as token_service
from runs.actions import replicas_and_pools
from runs.admin.base import (
    Confirmation,
    ForAdministrators,
    ReadOnlyAdmin,
    Unchangeable,
    back,
    confirmed,
    plural,
)
from runs.admin.jobs import orphans
from runs.admin.prices import prices
from runs.alerts import store
from runs.alerts.rules import KINDS
from runs.models import (
    Alert,
    ApiToken,
    Checkpoint,
    Contribution,
    Event,
    ReplicaAttempt,
    ReplicaPool,
    Round,
    Run,
)

# Users are managed under /people/, which protects the last administrator.
admin.site.unregister([User, Group])
# Message lists need the width; the index is one click away.
admin.site.enable_nav_sidebar = False


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    list_display = (
        "name",
        "state",
        "state_since",
        "owner",
        "committed_rounds",
        "train_loss",
        "created_at",
    )
    list_filter = ("state", "owner")
    list_select_related = ("owner",)
    search_fields = ("id", "name", "rendezvous")
    date_hierarchy = "created_at"
    actions = ("stop",)

    @admin.action(description="Stop at the newest committed round", permissions=["operate"])
    def stop(self, request: HttpRequest, queryset: QuerySet[Run]) -> HttpResponse | None:
        assert isinstance(request.user, User)
        runs = list(queryset.select_related("owner"))
        if not confirmed(request):
            return Confirmation(
                words="Replicas end at the newest committed round and write the final weights. "
                "Replicas that take longer than two rounds are ended. A stopped run can be resumed "
                "only if it has no final weights.",
                button=f"Stop {plural(len(runs), 'run')}",
                action="stop",
                origin="Runs",
                head=("Run", "State", "Owner", "Rounds"),
                rows=[
                    (r, r.state, r.owner, f"{r.committed_rounds}/{r.total_rounds}") for r in runs
                ],
                keys=[run.pk for run in runs],
            ).page(request)
        for run in runs:
            if replicas_and_pools.request_stop(run, actor=request.user):
                message = "replicas end at the newest committed round and write the final weights"
                self.message_user(request, f"{run}: stopping; {message}", messages.SUCCESS)
            else:
                self.message_user(
                    request, f"{run} is {run.state} and cannot be stopped", messages.WARNING
                )
        return back(request)


@admin.register(ReplicaPool)
class ReplicaPoolAdmin(ReadOnlyAdmin):
    """Pools, and under *Prices* the cost of their hardware."""

    list_display = (
        "__str__",
        "run",
        "region",
        "credential",
        "price_usd_h",
        "max_price_usd_h",
        "failures",
        "held_or_last_error",
    )
    list_filter = ("backend", "requires_intervention", "spot", ("held", admin.EmptyFieldListFilter))
    list_select_related = ("run", "credential")
    search_fields = ("run__name", "hardware")
    ordering = ("-id",)

    @admin.display(description="launch blocked by")
    def held_or_last_error(self, pool: ReplicaPool) -> str:
        return pool.held or pool.last_error

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(prices)
        return [path("prices/", view, name="runs_prices"), *super().get_urls()]


@admin.register(ReplicaAttempt)
class ReplicaAttemptAdmin(ReadOnlyAdmin):
    list_display = (
        "launch_key",
        "run",
        "replica",
        "number",
        "cause",
        "exit_code",
        "created_at",
        "ended_at",
        "cost_usd",
    )
    list_filter = ("cause",)
    list_select_related = ("replica__run",)
    search_fields = ("launch_key", "replica__run__name")
    ordering = ("-id",)

    @admin.display(description="run", ordering="replica__run")
    def run(self, attempt: ReplicaAttempt) -> Run:
        return attempt.replica.run

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(orphans)
        return [path("orphans/", view, name="runs_orphans"), *super().get_urls()]


@admin.register(Round)
class RoundAdmin(ReadOnlyAdmin):
    list_display = (
        "number",
        "run",
        "state",
        "contributors",
        "loss",
        "eval_loss",
        "digest_mismatch",
        "committed_at",
    )
    list_filter = ("state", "digest_mismatch")
    list_select_related = ("run",)
    search_fields = ("run__name", "run__id")
    ordering = ("-id",)


@admin.register(Contribution)
class ContributionAdmin(ReadOnlyAdmin):
    list_display = (
        "round",
        "run",
        "replica",
        "state",
        "reason",
        "tokens",
        "norm",
        "size_bytes",
        "uploaded_at",
    )
    list_filter = ("state",)
    list_select_related = ("round__run", "replica")
    search_fields = ("round__run__name", "round__run__id", "reason")
    ordering = ("-id",)

    @admin.display(description="run", ordering="round__run")
    def run(self, contribution: Contribution) -> Run:
        return contribution.round.run


@admin.register(Checkpoint)
class CheckpointAdmin(ReadOnlyAdmin):
    list_display = ("round", "run", "final", "key", "size_bytes", "created_at")
    list_filter = ("final",)
    list_select_related = ("run",)
    search_fields = ("run__name", "run__id")
    ordering = ("-id",)


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """Events are never edited, not even by a superuser."""

    list_display = ("at", "level", "run", "replica", "message", "moved", "actor", "kind")
    list_filter = ("level", "kind")
    list_select_related = ("run", "replica", "actor")
    search_fields = ("message", "run__name", "run__id")
    ordering = ("-id",)

    @admin.display(description="from, to")
    def moved(self, event: Event) -> str:
        return f"{event.from_state} → {event.to_state}" if event.to_state else ""


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin):
    list_display = (
        "opened_at",
        "level",
        "title",
        "run",
        "subject",
        "message",
        "times",
        "closed_at",
        "acknowledged_by",
    )
    list_filter = ("level", "kind", ("closed_at", admin.EmptyFieldListFilter))
    list_select_related = ("run", "replica", "acknowledged_by")
    search_fields = ("message", "run__name")
    actions = ("acknowledge",)

    @admin.display(description="alert", ordering="kind")
    def title(self, alert: Alert) -> str:
        return KINDS.get(alert.kind, alert.kind)

    @admin.action(description="Acknowledge", permissions=["operate"])
    def acknowledge(self, request: HttpRequest, queryset: QuerySet[Alert]) -> None:
        assert isinstance(request.user, User)
        done = sum(store.acknowledge(alert, actor=request.user) for alert in queryset)
        self.message_user(request, f"{done} acknowledged", messages.SUCCESS)


@admin.register(ApiToken)
class ApiTokenAdmin(Unchangeable, ForAdministrators):
    """API tokens of all users, which administrators can revoke. Only its owner sees a token's text,
    once. Revoked tokens stay in the list."""

    list_display = (
        "name",
        "hint",
        "owner",
        "scope_list",
        "created_at",
        "last_used_at",
        "expires_at",
        "works",
    )
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "owner")
    list_select_related = ("owner",)
    search_fields = ("name", "owner__username", "hint")
    fields = (
        "name",
        "hint",
        "owner",
        "scope_list",
        "created_at",
        "last_used_at",
        "expires_at",
        "revoked_at",
    )
    actions = ("revoke",)

    @admin.display(description="scopes")
    def scope_list(self, token: ApiToken) -> str:
        return ", ".join(token.scopes)

    @admin.display(description="works", boolean=True)
    def works(self, token: ApiToken) -> bool:
        is_expired = token.expires_at is not None and token.expires_at <= timezone.now()
        return token.revoked_at is None and not is_expired and token.owner.is_active

    @admin.action(description="Revoke", permissions=["view"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> HttpResponse | None:
        tokens = list(queryset.select_related("owner"))
        if not confirmed(request):
            return Confirmation(
                words="Programs that use them are refused from now on. This cannot be undone; "
                "their owners can create new ones.",
                button=f"Revoke {plural(len(tokens), 'token')}",
                action="revoke",
                origin="API tokens",
                head=("Token", "Owner", "Scopes", "Last used"),
                rows=[(t, t.owner, self.scope_list(t), t.last_used_at) for t in tokens],
                keys=[token.pk for token in tokens],
            ).page(request)
        assert isinstance(request.user, User)
        done = [token for token in tokens if token_service.revoke(token, actor=request.user)]
        for token in done:
            self.log_change(request, token, "Revoked")
        self.message_user(request, f"{len(done)} revoked", messages.SUCCESS)
        return back(request)
