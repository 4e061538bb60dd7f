"""The tables as an administrator may look into them, and the few things that may be done there.

Nothing can be edited, added or deleted: every row is either written by a service with its Event or
read from the bucket, and a hand-made change would be undone or, worse, believed. The actions call
the same services as the pages do. Who may act is :func:`runs.permissions.has_role`, not Django's
own model permissions, so that a staff member who only looks cannot stop a run.
"""

from __future__ import annotations

from django.contrib import admin, messages
from django.contrib.auth.models import Group, User
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils import timezone

from runs.actions import api_tokens as token_service
from runs.actions import replicas_and_pools
from runs.admin.base import (
    ForAdministrators,
    Question,
    ReadOnlyAdmin,
    Unchangeable,
    back,
    confirmed,
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

# People are looked after under /people/, where the last administrator cannot be lost.
admin.site.unregister([User, Group])
# Lists of messages need the width; the index is a step away.
admin.site.enable_nav_sidebar = False


@admin.register(Run)
class RunAdmin(ReadOnlyAdmin):
    list_display = (
        "name", "state", "state_since", "owner", "committed_rounds", "train_loss", "created_at",
    )  # fmt: skip
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
            count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
            return Question(
                title=f"Stop {count}?",
                words="Replicas end at the newest committed round and write the final weights; "
                "who has not after two rounds is ended. A run that was stopped can be resumed "
                "only if it has no final weights.",
                button=f"Stop {count}",
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
                words = "replicas end at the newest committed round and write the final weights"
                self.message_user(request, f"{run}: stopping; {words}", messages.SUCCESS)
            else:
                self.message_user(
                    request, f"{run} is {run.state} and cannot be stopped", messages.WARNING
                )
        return back(request)


@admin.register(ReplicaPool)
class ReplicaPoolAdmin(ReadOnlyAdmin):
    """Pools, and under *Prices* what their hardware costs."""

    list_display = (
        "__str__", "run", "region", "credential", "price_usd_h", "max_price_usd_h", "failures",
        "trouble_or_held",
    )  # fmt: skip
    list_filter = ("backend", "needs_person", "spot", ("held", admin.EmptyFieldListFilter))
    list_select_related = ("run", "credential")
    search_fields = ("run__name", "hardware")
    ordering = ("-id",)

    @admin.display(description="what keeps it from launching")
    def trouble_or_held(self, pool: ReplicaPool) -> str:
        return pool.held or pool.trouble

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(prices)
        return [path("prices/", view, name="runs_prices"), *super().get_urls()]


@admin.register(ReplicaAttempt)
class ReplicaAttemptAdmin(ReadOnlyAdmin):
    list_display = (
        "launch_key", "run", "replica", "number", "cause", "exit_code", "created_at", "ended_at",
        "cost_usd",
    )  # fmt: skip
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
        "number", "run", "state", "contributors", "loss", "eval_loss", "digest_mismatch",
        "committed_at",
    )  # fmt: skip
    list_filter = ("state", "digest_mismatch")
    list_select_related = ("run",)
    search_fields = ("run__name", "run__id")
    ordering = ("-id",)


@admin.register(Contribution)
class ContributionAdmin(ReadOnlyAdmin):
    list_display = (
        "round", "run", "replica", "state", "reason", "tokens", "norm", "size_bytes",
        "uploaded_at",
    )  # fmt: skip
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
    """Never edited, not even by a superuser: what happened stays."""

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
        "opened_at", "level", "title", "run", "subject", "message", "times", "closed_at",
        "acknowledged_by",
    )  # fmt: skip
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
    """Whose tokens there are, and their end. A token is made by its owner, whom alone it is shown
    to, and stays in this list when it is revoked."""

    list_display = (
        "name", "hint", "owner", "scopes_told", "created_at", "last_used_at", "expires_at", "works",
    )  # fmt: skip
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "owner")
    list_select_related = ("owner",)
    search_fields = ("name", "owner__username", "hint")
    fields = ("name", "hint", "owner", "scopes_told", "created_at", "last_used_at", "expires_at",
              "revoked_at")  # fmt: skip
    actions = ("revoke",)

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return self.has_module_permission(request)

    @admin.display(description="may")
    def scopes_told(self, token: ApiToken) -> str:
        return ", ".join(token.scopes)

    @admin.display(description="works", boolean=True)
    def works(self, token: ApiToken) -> bool:
        over = token.expires_at is not None and token.expires_at <= timezone.now()
        return token.revoked_at is None and not over and token.owner.is_active

    @admin.action(description="Revoke", permissions=["revoke"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> HttpResponse | None:
        tokens = list(queryset.select_related("owner"))
        if not confirmed(request):
            count = f"{len(tokens)} token{'s' if len(tokens) != 1 else ''}"
            return Question(
                title=f"Revoke {count}?",
                words="Programs that use them are refused from now on. This cannot be undone; "
                "their owners can make others.",
                button=f"Revoke {count}",
                action="revoke",
                origin="API tokens",
                head=("Token", "Owner", "May", "Used last"),
                rows=[(t, t.owner, self.scopes_told(t), t.last_used_at) for t in tokens],
                keys=[token.pk for token in tokens],
            ).page(request)
        assert isinstance(request.user, User)
        done = [token for token in tokens if token_service.revoke(token, actor=request.user)]
        for token in done:
            self.log_change(request, token, "Revoked")
        words = f"{len(done)} revoked; they open nothing any more"
        self.message_user(request, words, messages.SUCCESS)
        return back(request)
