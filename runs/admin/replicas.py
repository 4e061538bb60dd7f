"""Replicas in the admin, with confirmed actions. The confirmation shows the consequences for the
run, e.g. *live 3 < quorum 4: the run will stall*."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse

from runs.actions import admin_overrides, replicas_and_pools
from runs.admin.base import Confirmation, ReadOnlyAdmin, back, confirmed, plural
from runs.exceptions import IllegalTransition, InvalidRun
from runs.models import Replica, ReplicaPool, Run
from runs.states import REPLICA_WORKING, RUN_ENDED, ReplicaState
from runs.task_queue import enqueue

AT_ONCE = 500
"""Most replicas of one action: each is a field of the confirmation form."""


@dataclass(frozen=True, kw_only=True)
class ReplicaAction:
    """An action on replicas. ``button`` has a placeholder for their number.

    ``leaves``: working replicas stop working, at least temporarily. ``returns``: they relaunch.
    """

    label: str
    button: str
    words: str
    done: str
    do: Callable[..., bool]
    leaves: bool = True
    returns: bool = False
    danger: bool = True


def _evict(replica: Replica, *, actor: User) -> bool:
    return replicas_and_pools.stop_replica(replica, actor=actor, force=True)


def _one_more(replica: Replica, *, actor: User) -> bool:
    pool = ReplicaPool.objects.get(pk=replica.pool_id)
    return replicas_and_pools.scale_pool(pool, pool.count + 1, actor=actor) > 0


REPLICA_ACTIONS = {
    "drain": ReplicaAction(
        label="Drain: let it finish and leave permanently",
        button="Drain {}",
        words="The replica contributes its local steps, saves its state and exits. Its job is "
        "ended after two rounds at most. It is not relaunched automatically.",
        done="drain requested",
        do=replicas_and_pools.stop_replica,
    ),
    "restart": ReplicaAction(
        label="Restart: drain it, then launch it again",
        button="Restart {}",
        words="The replica is drained, and the same identity launches again at once. Its count of "
        "failures is reset.",
        done="will be relaunched",
        do=replicas_and_pools.restart_replica,
        returns=True,
        danger=False,
    ),
    "evict": ReplicaAction(
        label="Evict: end its job now, permanently",
        button="Evict {}",
        words="The job is ended now; steps since its last contribution are lost. It is not "
        "relaunched automatically.",
        done="is ended",
        do=_evict,
    ),
    "kill": ReplicaAction(
        label="Kill: end its job now, as a failure",
        button="Kill {}",
        words="The job is ended now; steps since its last contribution are lost. It is relaunched "
        "by policy, and this counts as one of its restarts.",
        done="is ended and will be relaunched",
        do=admin_overrides.kill_replica,
        returns=True,
    ),
    "mark_lost": ReplicaAction(
        label="Mark as lost: its job is gone",
        button="Mark {} as lost",
        words="For a job that is gone although its backend does not report it; the backend is not "
        "called. The replica is relaunched by policy. If the job is alive after all, it takes part "
        "in no round, and the reaper ends it within minutes; it is billed until then.",
        done="is marked as lost",
        do=admin_overrides.mark_lost,
        returns=True,
    ),
    "add_to_pool": ReplicaAction(
        label="Add one more like it to its pool",
        button="Add one more for each of {}",
        words="Its pool grows by one replica for each selected one. Replicas that have left are "
        "relaunched before new ones are created.",
        done="its pool grows by one",
        do=_one_more,
        leaves=False,
        danger=False,
    ),
}


def what_follows(run: Run, *, working: int, done: int) -> tuple[int, str]:
    """The consequence for a run with ``working`` replicas left, as (message level, text).

    Uses the same count as :func:`runs.reconcile.decisions.decide_run`.
    """
    quorum = run.settings.min_quorum
    if run.state in RUN_ENDED:
        return messages.INFO, f"{run}: the run has ended, nothing changes"
    if working + done < quorum:
        return messages.WARNING, f"{run}: live {working} < quorum {quorum}: the run will stall"
    return messages.INFO, f"{run}: live {working}, quorum {quorum}: the run continues"


def counted(run_ids: Any) -> QuerySet[Any]:
    """These runs, annotated with their numbers of working and finished replicas."""
    return Run.objects.filter(pk__in=run_ids).annotate(
        working=Count("replicas", filter=Q(replicas__state__in=sorted(REPLICA_WORKING))),
        done=Count("replicas", filter=Q(replicas__state=ReplicaState.DONE)),
    )


def consequences(action: ReplicaAction, replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """The consequences for each run of these replicas, before the action. One query."""
    if not action.leaves:
        return [
            {"bad": False, "words": message}
            for message in _cost_messages({replica.pool_id for replica in replicas}, replicas)
        ]
    leaving = Counter(r.run_id for r in replicas if r.state in REPLICA_WORKING)
    result = []
    for run in counted({replica.run_id for replica in replicas}).order_by("name"):
        level, message = what_follows(run, working=run.working - leaving[run.pk], done=run.done)
        bad = level == messages.WARNING
        result.append(
            {
                "bad": bad,
                "words": message + (" until they are back" if bad and action.returns else ""),
            }
        )
    return result


def _cost_messages(pool_ids: set[int], replicas: Sequence[Replica]) -> list[str]:
    more = Counter(replica.pool_id for replica in replicas)
    message = []
    for pool in ReplicaPool.objects.filter(pk__in=pool_ids).select_related("run").order_by("pk"):
        price = pool.price_usd_h
        costs = (
            "the cost is unknown" if price is None else f"${price * more[pool.pk]:.2f} an hour more"
        )
        wanted = pool.count + more[pool.pk]
        message.append(f"{pool.run}: {pool.backend} {pool.hardware}: {wanted} wanted, {costs}")
    return message


def _admin_action(name: str) -> Callable[..., HttpResponse | None]:
    """One of :data:`REPLICA_ACTIONS`, as an action of the admin."""

    @admin.action(description=REPLICA_ACTIONS[name].label, permissions=["operate"])
    def act(
        model_admin: ReplicaAdmin, request: HttpRequest, queryset: QuerySet[Replica]
    ) -> HttpResponse | None:
        return model_admin.confirm(name, request, queryset)

    act.__name__ = name
    return act


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin):
    list_display = (
        "__str__",
        "run",
        "state",
        "state_since",
        "backend_state",
        "round",
        "loss",
        "restarts",
        "beat_at",
        "host",
    )
    list_filter = ("state", "pool__backend")
    list_select_related = ("run",)
    search_fields = ("run__id", "run__name", "host")
    ordering = ("-run__created_at", "number")
    actions = (*(_admin_action(name) for name in REPLICA_ACTIONS), "ask")

    @admin.action(description="Poll its backend for the job's state", permissions=["operate"])
    def ask(self, request: HttpRequest, queryset: QuerySet[Replica]) -> None:
        """Show the job's state. Changes nothing, so it needs no confirmation; the reconciler polls
        again and stores the result."""
        replicas = list(queryset.select_related("run", "pool__credential")[:AT_ONCE])
        reports = admin_overrides.ask_backends(replicas)
        for replica in replicas:
            message = reports.get(replica.pk, "was not polled: too many at once")
            self.message_user(request, f"{replica} of {replica.run}: {message}", messages.INFO)
        for run_id in {replica.run_id for replica in replicas}:
            enqueue("reconcile_run", str(run_id))

    def confirm(
        self, name: str, request: HttpRequest, queryset: QuerySet[Replica]
    ) -> HttpResponse | None:
        """Confirm, then act on the replicas that were shown, whatever the list's filters match
        now."""
        action = REPLICA_ACTIONS[name]
        replicas = list(queryset.select_related("run", "pool").order_by("run", "number")[:AT_ONCE])
        if confirmed(request):
            self._do(action, request, replicas)
            return back(request)
        return Confirmation(
            words=action.words,
            button=action.button.format(plural(len(replicas), "replica")),
            action=name,
            origin="Replicas",
            head=("Replica", "Run", "Pool", "State", "Reported by its backend"),
            rows=[
                (r, r.run, f"{r.pool.backend} {r.pool.hardware}", r.state, r.backend_state)
                for r in replicas
            ],
            keys=[replica.pk for replica in replicas],
            consequences=consequences(action, replicas),
            danger=action.danger,
        ).page(request)

    def _do(self, action: ReplicaAction, request: HttpRequest, replicas: Sequence[Replica]) -> None:
        assert isinstance(request.user, User)
        touched: set[Any] = set()
        for replica in replicas:
            name = f"{replica} of {replica.run}"
            try:
                moved = action.do(replica, actor=request.user)
            except (IllegalTransition, InvalidRun) as error:
                self.message_user(request, f"{name}: {error}", messages.ERROR)
                continue
            if moved:
                touched.add(replica.run_id)
                self.message_user(request, f"{name}: {action.done}", messages.SUCCESS)
            else:
                message = f"{name} is {replica.state}, nothing to do"
                self.message_user(request, message, messages.WARNING)
        for run in counted(touched):
            level, message = what_follows(run, working=run.working, done=run.done)
            self.message_user(request, message, level)
