"""The tables as an administrator may look into them, and the few things that may be done there.

Nothing can be edited, added or deleted: every row is either written by a service with its Event or
read from the bucket, and a hand-made change would be undone or, worse, believed. The actions call
the same services as the pages do. Who may act is :func:`runs.selectors.has_role`, not Django's own
model permissions, so that a staff member who only looks cannot stop a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.auth.models import Group, User
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest

from runs import selectors, services
from runs.admin import credentials as admin_credentials
from runs.admin import webhooks as admin_webhooks
from runs.exceptions import IllegalTransition
from runs.models import Checkpoint, Contribution, Event, Replica, ReplicaAttempt, Round, Run
from runs.states import REPLICA_WORKING, RUN_ENDED, ReplicaState

__all__ = ["admin_credentials", "admin_webhooks"]  # tables edited by hand register themselves

# People are looked after under /people/, where the last administrator cannot be lost.
admin.site.unregister([User, Group])

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class ReadOnlyAdmin(_ModelAdmin):
    """To look at. ``operate`` is what an action asks for in ``permissions``."""

    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return selectors.has_role(request.user, "admin")


def what_follows(run: Run, *, working: int, done: int) -> tuple[int, str]:
    """(message level, words) on a run that ``working`` replicas are left to work for.

    The same count as :func:`runs.control.decide.judge_run` makes once the replicas have left.
    """
    quorum = int(run.group_settings["min_quorum"])
    if run.state in RUN_ENDED:
        return messages.INFO, f"{run}: the run is over, nothing changes"
    if working + done < quorum:
        return messages.WARNING, f"{run}: live {working} < quorum {quorum}: the run will stall"
    return messages.INFO, f"{run}: live {working}, quorum {quorum}: the run goes on"


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
    def stop(self, request: HttpRequest, queryset: QuerySet[Run]) -> None:
        assert isinstance(request.user, User)
        for run in queryset:
            if services.request_stop(run, actor=request.user):
                words = "replicas end at the newest committed round and write the final weights"
                self.message_user(request, f"{run}: stopping; {words}", messages.SUCCESS)
            else:
                self.message_user(
                    request, f"{run} is {run.state} and cannot be stopped", messages.WARNING
                )


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin):
    list_display = (
        "__str__", "run", "state", "state_since", "backend_state", "round", "loss", "restarts",
        "beat_at", "host",
    )  # fmt: skip
    list_filter = ("state", ("run", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("run",)
    search_fields = ("run__id", "run__name", "host")
    ordering = ("-run__created_at", "number")
    actions = ("stop", "restart")

    @admin.action(description="Stop for good", permissions=["operate"])
    def stop(self, request: HttpRequest, queryset: QuerySet[Replica]) -> None:
        self._act(request, queryset, services.stop_replica, "told to leave")

    @admin.action(description="Restart", permissions=["operate"])
    def restart(self, request: HttpRequest, queryset: QuerySet[Replica]) -> None:
        self._act(request, queryset, services.restart_replica, "will be launched again")

    def _act(
        self, request: HttpRequest, queryset: QuerySet[Replica], service: Any, done: str
    ) -> None:
        assert isinstance(request.user, User)
        touched: set[Any] = set()
        for replica in queryset.select_related("run"):
            name = f"{replica} of {replica.run}"
            try:
                moved = service(replica, actor=request.user)
            except IllegalTransition as error:
                self.message_user(request, f"{name}: {error}", messages.ERROR)
                continue
            if moved:
                touched.add(replica.run_id)
                self.message_user(request, f"{name}: {done}", messages.SUCCESS)
            else:
                self.message_user(
                    request, f"{name} is {replica.state}, nothing to do", messages.WARNING
                )
        runs = Run.objects.filter(pk__in=touched).annotate(
            working=Count("replicas", filter=Q(replicas__state__in=sorted(REPLICA_WORKING))),
            done=Count("replicas", filter=Q(replicas__state=ReplicaState.DONE)),
        )
        for run in runs:
            level, words = what_follows(run, working=run.working, done=run.done)
            self.message_user(request, words, level)


@admin.register(ReplicaAttempt)
class ReplicaAttemptAdmin(ReadOnlyAdmin):
    list_display = (
        "launch_key", "replica", "number", "cause", "exit_code", "created_at", "ended_at",
    )  # fmt: skip
    list_filter = ("cause",)
    list_select_related = ("replica",)
    search_fields = ("launch_key",)
    ordering = ("-id",)


@admin.register(Round)
class RoundAdmin(ReadOnlyAdmin):
    list_display = (
        "number", "run", "state", "contributors", "loss", "eval_loss", "digest_mismatch",
        "committed_at",
    )  # fmt: skip
    list_filter = ("state", "digest_mismatch", ("run", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("run",)
    ordering = ("-id",)


@admin.register(Contribution)
class ContributionAdmin(ReadOnlyAdmin):
    list_display = (
        "round", "replica", "state", "reason", "tokens", "norm", "size_bytes", "uploaded_at",
    )  # fmt: skip
    list_filter = ("state", ("round__run", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("round", "replica")
    ordering = ("-id",)


@admin.register(Checkpoint)
class CheckpointAdmin(ReadOnlyAdmin):
    list_display = ("round", "run", "final", "key", "size_bytes", "created_at")
    list_filter = ("final", ("run", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("run",)
    ordering = ("-id",)


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """Never edited, not even by a superuser: what happened stays."""

    list_display = (
        "at", "level", "kind", "run", "replica", "actor", "from_state", "to_state", "message",
    )  # fmt: skip
    list_filter = ("level", "kind", ("run", admin.RelatedOnlyFieldListFilter))
    list_select_related = ("run", "replica", "actor")
    search_fields = ("message",)
    ordering = ("-id",)
