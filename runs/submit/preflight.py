"""What a draft would fail of, asked before anything is spent: for the form and its *Test* buttons.

Nothing is started and nothing is left behind. Backends, the bucket and the data are asked at once,
and not for longer than :data:`runs.backends.parallel_calls.PATIENCE_S`. The launch does not trust
an earlier answer: what has broken since ends it with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from diloco.protocol.workload import ByteGPTWorkload
from executors.base import ExecutorError, NeedsPerson, ReplicaSpec, RetryLater
from executors.loading import wait_loaded
from executors.registry import BACKENDS
from runs.backends.executors import capabilities_of, executor_of
from runs.backends.parallel_calls import NoAnswer, ask_all
from runs.credentials.restrictions import refused_options
from runs.models import Credential, Run
from runs.redaction import redact
from runs.submit.bucket_check import check_data, check_rendezvous, only_here
from runs.submit.forecast import ByPlace, forecast
from runs.submit.run_draft import PoolDraft, RunDraft

__all__ = [
    "Answer",
    "Finding",
    "check_data",
    "check_new_pool",
    "check_rendezvous",
    "check_run",
    "try_bucket",
    "try_pool",
]

LOAD_PATIENCE_S = 8.0
"""How long a check waits for the import of a client library, before the answers' own time."""

ROUNDS_IN_A_JOB = 3
"""A deadline that ends a job sooner spends most of it on starting up and catching up."""

_FIELDS = frozenset({"options", "hardware", "region", "spot", "image", "timeout_s", "credential"})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``field`` is the form's: ``rendezvous``, or ``pools.<place>.hardware``."""

    field: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``said`` is who and where we are to a backend, in its words; '' when it was not asked."""

    said: str = ""
    findings: tuple[Finding, ...] = ()


def check_run(
    draft: RunDraft, *, uri: str, rates: ByPlace, over_budget: bool = False
) -> list[Finding]:
    """All there is to say about a draft that :func:`runs.submit.create.check_draft` found all
    right.

    ``uri`` is the bucket, or the folder of buckets, that is asked. ``rates`` are
    :func:`runs.submit.throughput_history.known_rates` of the workload. ``over_budget``: the person
    knows that the budget will end the run.
    """
    backends = [pool.backend for pool in draft.pools]
    store = _stored([draft.store_credential]).get(draft.store_credential)
    questions: dict[str, Callable[[], Answer]] = {
        **_pool_questions(draft.pools),
        "rendezvous": lambda: _told("rendezvous", check_rendezvous(uri, backends, store=store)),
    }
    data = getattr(draft.workload, "data", "")
    if isinstance(draft.workload, ByteGPTWorkload) or "://" in data:  # others may be a hub's names
        questions["data"] = lambda: _told("data", check_data(data, backends))
    found = [finding for answer in _ask(questions, draft.pools) for finding in answer.findings]
    found += _deadlines(draft, rates)
    return found if over_budget else found + _budget(draft, rates)


def try_pool(pool: PoolDraft, place: int = 0) -> Answer:
    """The *Test* button of a pool: does the credential work, and would a launch be taken?"""
    [answer] = _ask(_pool_questions([pool]), [pool])
    return Answer(
        said=answer.said,
        findings=tuple(
            Finding(field=f.field.replace("pools.0.", f"pools.{place}.", 1), message=f.message)
            for f in answer.findings
        ),
    )


def check_new_pool(run: Run, pool: PoolDraft) -> list[Finding]:
    """Of a pool that is to join a run: can it reach the bucket, and would a launch be taken?"""
    if here := only_here(run.rendezvous, [pool.backend], store=run.store_credential):
        words = f"expected a backend that can reach {here}, found {BACKENDS[pool.backend]}"
        return [_at(0, "backend", words)]
    return list(try_pool(pool).findings)


def try_bucket(
    uri: str, pools: Sequence[PoolDraft], *, store_credential: int | None = None
) -> Answer:
    """The *Test* button of the rendezvous."""
    backends = [pool.backend for pool in pools]
    store = _stored([store_credential]).get(store_credential)
    [answer] = _ask(
        {"rendezvous": lambda: _told("rendezvous", check_rendezvous(uri, backends, store=store))},
        pools,
    )
    return answer


def _told(field: str, messages: Sequence[str]) -> Answer:
    return Answer(findings=tuple(Finding(field=field, message=m) for m in messages))


def _stored(ids: Sequence[int | None]) -> dict[int | None, Credential]:
    """Read before anything is asked: the threads that ask have no business in the database."""
    wanted = {pk for pk in ids if pk is not None}
    return dict(Credential.objects.in_bulk(wanted)) if wanted else {}


# Backends.


def _pool_questions(pools: Sequence[PoolDraft]) -> dict[str, Callable[[], Answer]]:
    credentials = _stored([pool.credential for pool in pools])
    alike: dict[tuple[object, ...], int] = {}
    for pool in pools:
        alike[_quota(pool)] = alike.get(_quota(pool), 0) + pool.count
    return {
        f"pools.{place}": partial(
            _ask_pool, pool, place, credentials.get(pool.credential), alike[_quota(pool)]
        )
        for place, pool in enumerate(pools)
    }


def _quota(pool: PoolDraft) -> tuple[object, ...]:
    """Pools of one of these take from the same quota."""
    return pool.backend, pool.credential, pool.hardware, pool.region, pool.spot


def _ask_pool(pool: PoolDraft, place: int, credential: Credential | None, count: int) -> Answer:
    if beyond := _beyond(pool, credential):
        return Answer(findings=tuple(_at(place, field, words) for field, words in beyond.items()))
    executor = executor_of(pool.backend, credential)
    said = executor.check()
    spec = ReplicaSpec(
        launch_key="preflight",
        replica=0,
        hardware=pool.hardware,
        region=pool.region,
        spot=pool.spot,
        timeout_s=pool.timeout_s or None,
        image=pool.image,
        options=pool.options,
    )
    problems = executor.preflight(spec, count)
    return Answer(
        said=redact(said), findings=tuple(_at(place, p.field, p.message) for p in problems)
    )


def _beyond(pool: PoolDraft, credential: Credential | None) -> dict[str, str]:
    """Field -> what the backend cannot do at all; no need to ask it."""
    if problem := refused_options(pool.backend, credential, pool.options):
        return {"options": problem}  # the backend is not asked with the credential's rights
    can, label = capabilities_of(pool.backend, credential), BACKENDS[pool.backend]
    found = {}
    if pool.spot and not can.spot:
        found["spot"] = f"{label} has no spot machines"
    if pool.image and not can.images:
        found["image"] = f"{label} takes no image, found {pool.image!r}"
    if can.max_lifetime_s is not None and pool.timeout_s > can.max_lifetime_s:
        found["timeout_s"] = (
            f"expected at most the {can.max_lifetime_s:.0f} s that {label} allows, "
            f"found {pool.timeout_s} s"
        )
    return found


def _at(place: int, field: str, message: str) -> Finding:
    return Finding(
        field=f"pools.{place}.{field if field in _FIELDS else 'backend'}", message=redact(message)
    )


def _ask(questions: Mapping[str, Callable[[], Answer]], pools: Sequence[PoolDraft]) -> list[Answer]:
    """The import of a backend's client takes no time from its answer: it is waited for before."""
    loading = wait_loaded({pool.backend for pool in pools}, patience_s=LOAD_PATIENCE_S)
    answers, ready = [], {}
    for name, question in questions.items():
        head, _, place = name.partition(".")
        if head == "pools" and (backend := pools[int(place)].backend) in loading:
            message = (
                f"The client library of {BACKENDS[backend]} is still being loaded, which can take "
                "half a minute after the server's start. Check again in a moment."
            )
            answers.append(Answer(findings=(_at(int(place), "backend", message),)))
        else:
            ready[name] = question
    for name, answer in ask_all(ready).items():
        if isinstance(answer, Answer):
            answers.append(answer)
            continue
        head, _, place = name.partition(".")
        if head == "pools":
            finding = _of_backend(pools[int(place)], int(place), answer)
        else:
            finding = Finding(field=name, message=redact(str(answer)) or type(answer).__name__)
        answers.append(Answer(findings=(finding,)))
    return answers


def _of_backend(pool: PoolDraft, place: int, error: Exception) -> Finding:
    """What a backend answered with instead of an answer."""
    label = BACKENDS[pool.backend]
    words = str(error).removeprefix(f"{label}: ")
    if isinstance(error, NeedsPerson):
        return _at(place, "credential", f"{label}: {words}")
    if isinstance(error, NoAnswer | RetryLater):
        return _at(place, "backend", f"{label} could not be asked: {words}")
    if isinstance(error, ExecutorError):
        return _at(place, "backend", f"{label}: {words}")
    # A bug or a broken client. Its words may hold anything.
    return _at(place, "backend", f"{label} could not be asked: {type(error).__name__}")


# What follows from what is known.


def _deadlines(draft: RunDraft, rates: ByPlace) -> list[Finding]:
    round_s = forecast(draft, rates).round_s
    if round_s is None:
        return []
    credentials = _stored([pool.credential for pool in draft.pools])
    found = []
    least_s = ROUNDS_IN_A_JOB * round_s
    for place, pool in enumerate(draft.pools):
        can = capabilities_of(pool.backend, credentials.get(pool.credential))
        life_s = pool.timeout_s or can.max_lifetime_s
        if life_s is not None and life_s < least_s:
            found.append(
                _at(
                    place,
                    "timeout_s",
                    f"expected at least {ROUNDS_IN_A_JOB} rounds, about {least_s:.0f} s at the "
                    f"rate of earlier runs, found {life_s:.0f} s",
                )
            )
    return found


def _budget(draft: RunDraft, rates: ByPlace) -> list[Finding]:
    money = forecast(draft, rates)
    if not draft.budget_usd or money.usd is None or money.usd <= draft.budget_usd:
        return []
    until = "to the time limit" if money.hours_by == "time limit" else "for all rounds"
    words = (
        f"expected at least ${money.usd:.2f}, the estimate {until} ({money.hours:.1f} h at "
        f"${money.usd_h:.2f} an hour), found ${draft.budget_usd:.2f}"
    )
    return [Finding(field="budget_usd", message=words)]
