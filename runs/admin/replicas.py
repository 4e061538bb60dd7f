"""Replicas in the admin, and what may be done to them. Each deed asks first, and says what will
follow for the run: *live 3 < quorum 4: the run will stall*."""

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
from runs.admin.base import Question, ReadOnlyAdmin, back, confirmed
from runs.exceptions import IllegalTransition, InvalidRun
from runs.models import Replica, ReplicaPool, Run
from runs.states import REPLICA_WORKING, RUN_ENDED, ReplicaState
from runs.task_queue import enqueue

AT_ONCE = 500
"""Replicas of one deed: each is a field of the form that asks."""


@dataclass(frozen=True, kw_only=True)
class Deed:
    """One thing that may be done; ``button`` has a place for how many. ``leaves``: replicas at work
    stop working, at least for a while; ``returns``: they are launched again."""

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


DEEDS = {
    "drain": Deed(
        label="Drain: let it finish and leave for good",
        button="Drain {}",
        words="It gives what it has to a round, saves its state and leaves; after two rounds at "
        "most its job is ended. It is not launched again by itself.",
        done="told to leave",
        do=replicas_and_pools.stop_replica,
    ),
    "restart": Deed(
        label="Restart: let it finish, then launch it again",
        button="Restart {}",
        words="It leaves as drained ones do, and the same identity is launched again at once. "
        "What went wrong before is not held against it.",
        done="will be launched again",
        do=replicas_and_pools.restart_replica,
        returns=True,
        danger=False,
    ),
    "evict": Deed(
        label="Evict: end its job now, for good",
        button="Evict {}",
        words="Its job is ended now; steps since its last contribution are lost. It is not "
        "launched again by itself.",
        done="is ended",
        do=_evict,
    ),
    "kill": Deed(
        label="Kill: end its job now, as a failure",
        button="Kill {}",
        words="Its job is ended now; steps since its last contribution are lost. It is launched "
        "again by policy, and this counts as one of its restarts.",
        done="is ended and will be launched again",
        do=admin_overrides.kill_replica,
        returns=True,
    ),
    "mark_lost": Deed(
        label="Mark as lost: its job is gone",
        button="Mark {} as lost",
        words="For a job that is gone while its backend cannot say so: nothing is asked of the "
        "backend. It is launched again by policy. A job that lives after all is ended by the "
        "reaper within minutes, is paid for until then, and takes part in no round.",
        done="is marked as lost",
        do=admin_overrides.mark_lost,
        returns=True,
    ),
    "add_to_pool": Deed(
        label="Add one more like it to its pool",
        button="Add one more for each of {}",
        words="Its pool wants one replica more for each that was chosen. Who has left is launched "
        "again before new ones are made.",
        done="one more is wanted in its pool",
        do=_one_more,
        leaves=False,
        danger=False,
    ),
}


def what_follows(run: Run, *, working: int, done: int) -> tuple[int, str]:
    """(message level, words) on a run that ``working`` replicas are left to work for.

    The same count as :func:`runs.reconcile.decisions.judge_run` makes once the replicas have left.
    """
    quorum = int(run.group_settings["min_quorum"])
    if run.state in RUN_ENDED:
        return messages.INFO, f"{run}: the run is over, nothing changes"
    if working + done < quorum:
        return messages.WARNING, f"{run}: live {working} < quorum {quorum}: the run will stall"
    return messages.INFO, f"{run}: live {working}, quorum {quorum}: the run goes on"


def counted(run_ids: Any) -> QuerySet[Any]:
    """Those runs, with how many of their replicas work and are done."""
    return Run.objects.filter(pk__in=run_ids).annotate(
        working=Count("replicas", filter=Q(replicas__state__in=sorted(REPLICA_WORKING))),
        done=Count("replicas", filter=Q(replicas__state=ReplicaState.DONE)),
    )


def foretold(deed: Deed, replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """For each run of them: what follows, before it is done. One query."""
    if not deed.leaves:
        return [
            {"bad": False, "words": words}
            for words in _money({replica.pool_id for replica in replicas}, replicas)
        ]
    going = Counter(r.run_id for r in replicas if r.state in REPLICA_WORKING)
    told = []
    for run in counted({replica.run_id for replica in replicas}).order_by("name"):
        level, words = what_follows(run, working=run.working - going[run.pk], done=run.done)
        bad = level == messages.WARNING
        told.append(
            {"bad": bad, "words": words + (" until they are back" if bad and deed.returns else "")}
        )
    return told


def _money(pool_ids: set[int], replicas: Sequence[Replica]) -> list[str]:
    more = Counter(replica.pool_id for replica in replicas)
    words = []
    for pool in ReplicaPool.objects.filter(pk__in=pool_ids).select_related("run").order_by("pk"):
        price = pool.price_usd_h
        costs = (
            "what that costs is unknown"
            if price is None
            else f"${price * more[pool.pk]:.2f} an hour more"
        )
        wanted = pool.count + more[pool.pk]
        words.append(f"{pool.run}: {pool.backend} {pool.hardware}: {wanted} wanted, {costs}")
    return words


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin):
    list_display = (
        "__str__", "run", "state", "state_since", "backend_state", "round", "loss", "restarts",
        "beat_at", "host",
    )  # fmt: skip
    list_filter = ("state", "pool__backend")
    list_select_related = ("run",)
    search_fields = ("run__id", "run__name", "host")
    ordering = ("-run__created_at", "number")
    actions = ("drain", "restart", "evict", "kill", "ask", "mark_lost", "add_to_pool")

    @admin.action(description=DEEDS["drain"].label, permissions=["operate"])
    def drain(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse | None:
        return self._asked("drain", request, queryset)

    @admin.action(description=DEEDS["restart"].label, permissions=["operate"])
    def restart(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse | None:
        return self._asked("restart", request, queryset)

    @admin.action(description=DEEDS["evict"].label, permissions=["operate"])
    def evict(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse | None:
        return self._asked("evict", request, queryset)

    @admin.action(description=DEEDS["kill"].label, permissions=["operate"])
    def kill(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse | None:
        return self._asked("kill", request, queryset)

    @admin.action(description=DEEDS["mark_lost"].label, permissions=["operate"])
    def mark_lost(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse | None:
        return self._asked("mark_lost", request, queryset)

    @admin.action(description=DEEDS["add_to_pool"].label, permissions=["operate"])
    def add_to_pool(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse | None:
        return self._asked("add_to_pool", request, queryset)

    @admin.action(description="Ask its backend how its job is", permissions=["operate"])
    def ask(self, request: HttpRequest, queryset: QuerySet[Replica]) -> None:
        """Nothing is changed, so nothing is asked first. What was heard is brought into the tables
        by the reconciler's own question."""
        replicas = list(queryset.select_related("run", "pool__credential")[:AT_ONCE])
        said = admin_overrides.ask_backends(replicas)
        for replica in replicas:
            words = said.get(replica.pk, "was not asked: too many at once")
            self.message_user(request, f"{replica} of {replica.run}: {words}", messages.INFO)
        for run_id in {replica.run_id for replica in replicas}:
            enqueue("reconcile_run", str(run_id))

    def _asked(
        self, name: str, request: HttpRequest, queryset: QuerySet[Replica]
    ) -> HttpResponse | None:
        """Ask first; what is done then is what was shown, whatever the list's filters say now."""
        deed = DEEDS[name]
        replicas = list(queryset.select_related("run", "pool").order_by("run", "number")[:AT_ONCE])
        if confirmed(request):
            self._do(deed, request, replicas)
            return back(request)
        count = f"{len(replicas)} replica{'s' if len(replicas) != 1 else ''}"
        return Question(
            title=f"{deed.button.format(count)}?",
            words=deed.words,
            button=deed.button.format(count),
            action=name,
            origin="Replicas",
            head=("Replica", "Run", "Pool", "State", "Its backend says"),
            rows=[
                (r, r.run, f"{r.pool.backend} {r.pool.hardware}", r.state, r.backend_state)
                for r in replicas
            ],
            keys=[replica.pk for replica in replicas],
            foretold=foretold(deed, replicas),
            danger=deed.danger,
        ).page(request)

    def _do(self, deed: Deed, request: HttpRequest, replicas: Sequence[Replica]) -> None:
        assert isinstance(request.user, User)
        touched: set[Any] = set()
        for replica in replicas:
            name = f"{replica} of {replica.run}"
            try:
                moved = deed.do(replica, actor=request.user)
            except (IllegalTransition, InvalidRun) as error:
                self.message_user(request, f"{name}: {error}", messages.ERROR)
                continue
            if moved:
                touched.add(replica.run_id)
                self.message_user(request, f"{name}: {deed.done}", messages.SUCCESS)
            else:
                words = f"{name} is {replica.state}, nothing to do"
                self.message_user(request, words, messages.WARNING)
        for run in counted(touched):
            level, words = what_follows(run, working=run.working, done=run.done)
            self.message_user(request, words, level)
