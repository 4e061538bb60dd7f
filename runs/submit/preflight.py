"""Checks a draft before anything is spent: for the submit form and its *Test* buttons.

Nothing is launched and nothing is left behind. Backends, the bucket and the data are checked in
parallel, for at most :data:`runs.backends.parallel_calls.PATIENCE_S`. The launch checks again and
fails with the same messages if something broke in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from django.contrib.auth.models import User

from diloco.data.shard_index import ShardIndex
from diloco.protocol.workload import ByteGPTWorkload, HuggingFaceWorkload
from executors.base import (
    AccountError,
    ExecutorError,
    Problem,
    ReplicaSpec,
    RetryLater,
)
from executors.loading import wait_loaded
from executors.registry import BACKENDS
from runs.backends.executors import executor_of
from runs.backends.parallel_calls import CallTimeout, call_all
from runs.credentials.restrictions import refused_options
from runs.exceptions import InvalidRun
from runs.models import Credential, Run
from runs.redaction import clean_text
from runs.submit.bucket_check import check_data, check_rendezvous, local_address
from runs.submit.create import CheckedDraft, check_submission
from runs.submit.forecast import estimate_run
from runs.submit.limit_check import limit_problems
from runs.submit.pool_check import check_pool
from runs.submit.run_draft import PoolDraft, RunDraft
from runs.submit.shard_check import read_shards, shard_problem
from runs.submit.throughput_history import rates_of_all

__all__ = [
    "CheckResult",
    "Problem",
    "check",
    "check_bucket_connection",
    "check_data",
    "check_new_pool",
    "check_pool_connection",
    "check_rendezvous",
    "check_run",
    "check_runs",
]

LOAD_PATIENCE_S = 8.0
"""How long a check waits for the import of a client library, before its own timeout starts."""

_FIELDS = frozenset({"options", "hardware", "region", "spot", "image", "timeout_s", "credential"})


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check. ``account`` is the account and location as the backend reports them;
    '' if it was not called. ``index`` is that of token shards."""

    account: str = ""
    index: ShardIndex | None = None
    problems: tuple[Problem, ...] = ()


def check(
    draft: RunDraft, user: User, *, over_budget: bool = False, remote: bool = True
) -> tuple[Problem, ...]:
    """The problems of a submission: first of the draft itself, then of backends, bucket and data.

    ``remote`` False skips backends, bucket and data.
    """
    try:
        checked = check_submission(draft, user)
        if remote:
            require(checked, over_budget=over_budget)
    except InvalidRun as error:
        return error.problems
    return ()


def require(checked: CheckedDraft, *, over_budget: bool = False) -> None:
    """Raise :class:`InvalidRun` with all problems of backends, bucket and data."""
    problems = check_run(checked.draft, uri=checked.rendezvous, over_budget=over_budget)
    if problems:
        first, *others = problems
        raise InvalidRun(first.field, first.message, *others)


def check_run(draft: RunDraft, *, uri: str, over_budget: bool = False) -> list[Problem]:
    """All problems of a draft that passed :func:`runs.submit.create.check_draft`.

    ``uri`` is the bucket, or the folder of buckets, to check. ``over_budget``: the user accepts
    that the budget will end the run.
    """
    [problems] = check_runs([draft], uri=uri, over_budget=over_budget)
    return problems


def check_runs(
    drafts: Sequence[RunDraft], *, uri: str, over_budget: bool = False
) -> list[list[Problem]]:
    """The problems of each draft, as in :func:`check_run`. The drafts differ in settings and
    workload only. Pools, the bucket and each of the data are checked once."""
    pools, store = drafts[0].pools, drafts[0].store_credential
    checks = _pool_checks(pools) | _bucket_check(uri, pools, store)
    sources = [_data_source(draft) for draft in drafts]
    names = {
        source: f"data.{number}" for number, source in enumerate(dict.fromkeys(sources)) if source
    }
    backends = [pool.backend for pool in pools]
    checks |= {name: partial(_check_data, *source, backends) for source, name in names.items()}
    results = _run_checks(checks, pools)
    shared = [
        problem
        for name, result in results.items()
        if not name.startswith("data.")
        for problem in result.problems
    ]
    rates = rates_of_all(draft.workload.to_dict() for draft in drafts)
    return [
        shared
        + (_data_problems(draft, results[names[source]]) if source else [])
        + limit_problems(draft, estimate_run(draft, known), over_budget=over_budget)
        for draft, source, known in zip(drafts, sources, rates, strict=True)
    ]


# Data.


def _data_source(draft: RunDraft) -> tuple[str, bool] | None:
    """The URI of data that can be checked, and whether it is of token shards."""
    workload = draft.workload
    return (workload.data_uri, workload.is_sharded) if workload.data_uri else None


def _check_data(uri: str, is_sharded: bool, backends: Sequence[str]) -> CheckResult:
    if not is_sharded:
        return _to_result("data", check_data(uri, backends))
    try:
        return CheckResult(index=read_shards(uri, backends))
    except ValueError as error:
        return _to_result("data", [str(error)])


def _data_problems(draft: RunDraft, result: CheckResult) -> list[Problem]:
    problems = list(result.problems)
    workload = draft.workload
    if result.index is not None and isinstance(workload, ByteGPTWorkload | HuggingFaceWorkload):
        problem = shard_problem(result.index, workload, draft.settings)
        problems += _to_result("data", [problem] if problem else []).problems
    return problems


# Connections.


def check_pool_connection(pool: PoolDraft, index: int = 0) -> CheckResult:
    """Test a pool: whether its credential works and a launch would be accepted."""
    [result] = _run_checks(_pool_checks([pool]), [pool]).values()
    return CheckResult(
        account=result.account,
        problems=tuple(
            Problem(field=f.field.replace("pools.0.", f"pools.{index}.", 1), message=f.message)
            for f in result.problems
        ),
    )


def check_new_pool(run: Run, pool: PoolDraft) -> list[Problem]:
    """Check a pool that is added to a run: the pool itself, then whether it reaches the bucket and
    would launch."""
    try:
        check_pool(pool)
    except InvalidRun as error:
        return list(error.problems)
    if local := local_address(run.rendezvous, [pool.backend], store=run.store_credential):
        message = f"expected a backend that can reach {local}, found {BACKENDS[pool.backend]}"
        return [_at(0, "backend", message)]
    return list(check_pool_connection(pool).problems)


def check_bucket_connection(
    uri: str, pools: Sequence[PoolDraft], *, store_credential: int | None = None
) -> CheckResult:
    """Test the rendezvous."""
    [result] = _run_checks(_bucket_check(uri, pools, store_credential), pools).values()
    return result


def _bucket_check(
    uri: str, pools: Sequence[PoolDraft], store_credential: int | None
) -> dict[str, Callable[[], CheckResult]]:
    backends = [pool.backend for pool in pools]
    store = _credentials([store_credential]).get(store_credential)
    return {
        "rendezvous": lambda: _to_result("rendezvous", check_rendezvous(uri, backends, store=store))
    }


def _to_result(field: str, messages: Sequence[str]) -> CheckResult:
    return CheckResult(
        problems=tuple(Problem(field=field, message=clean_text(m)) for m in messages)
    )


def _credentials(ids: Sequence[int | None]) -> dict[int | None, Credential]:
    """Credentials by id. Loaded first, because the checking threads must not use the database."""
    wanted_ids = {pk for pk in ids if pk is not None}
    return dict(Credential.objects.in_bulk(wanted_ids)) if wanted_ids else {}


# Backends.


def _pool_checks(pools: Sequence[PoolDraft]) -> dict[str, Callable[[], CheckResult]]:
    credentials = _credentials([pool.credential for pool in pools])
    count_by_quota: dict[tuple[object, ...], int] = {}
    for pool in pools:
        count_by_quota[_quota(pool)] = count_by_quota.get(_quota(pool), 0) + pool.count
    return {
        f"pools.{index}": partial(
            _check_pool, pool, index, credentials.get(pool.credential), count_by_quota[_quota(pool)]
        )
        for index, pool in enumerate(pools)
    }


def _quota(pool: PoolDraft) -> tuple[object, ...]:
    """Pools with the same key share one quota."""
    return pool.backend, pool.credential, pool.hardware, pool.region, pool.spot


def _check_pool(
    pool: PoolDraft, index: int, credential: Credential | None, count: int
) -> CheckResult:
    if problem := refused_options(pool.backend, credential, pool.options):
        return CheckResult(problems=(_at(index, "options", problem),))
    executor = executor_of(pool.backend, credential)
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
    account, refusals = "", executor.capabilities.problems(spec)
    if not refusals:  # what needs no request to the backend comes first
        account, refusals = clean_text(executor.check()), executor.preflight(spec, count)
    return CheckResult(
        account=account,
        problems=tuple(_at(index, p.field, p.message) for p in refusals),
    )


def _at(index: int, field: str, message: str) -> Problem:
    return Problem(
        field=f"pools.{index}.{field if field in _FIELDS else 'backend'}",
        message=clean_text(message),
    )


def _run_checks(
    checks: Mapping[str, Callable[[], CheckResult]], pools: Sequence[PoolDraft]
) -> dict[str, CheckResult]:
    """Run the checks in parallel: results by name. Importing a client library happens before their
    timeout."""
    loading = wait_loaded({pool.backend for pool in pools}, patience_s=LOAD_PATIENCE_S)
    results, ready = {}, {}
    for name, run_check in checks.items():
        head, _, index = name.partition(".")
        if head == "pools" and (backend := pools[int(index)].backend) in loading:
            message = (
                f"The client library of {BACKENDS[backend]} is still loading, which can take half "
                "a minute after the server's start. Check again in a moment."
            )
            results[name] = CheckResult(problems=(_at(int(index), "backend", message),))
        else:
            ready[name] = run_check
    for name, result in call_all(ready).items():
        if isinstance(result, CheckResult):
            results[name] = result
            continue
        head, _, index = name.partition(".")
        if head == "pools":
            problem = _of_backend(pools[int(index)], int(index), result)
        else:
            problem = Problem(field=head, message=clean_text(str(result)) or type(result).__name__)
        results[name] = CheckResult(problems=(problem,))
    return results


def _of_backend(pool: PoolDraft, index: int, error: Exception) -> Problem:
    """A backend's exception as a problem."""
    label = BACKENDS[pool.backend]
    message = str(error).removeprefix(f"{label}: ") or type(error).__name__
    if isinstance(error, AccountError):
        return _at(index, "credential", f"{label}: {message}")
    if isinstance(error, CallTimeout | RetryLater):
        return _at(index, "backend", f"{label} could not be checked: {message}")
    if isinstance(error, ExecutorError):
        return _at(index, "backend", f"{label}: {message}")
    # A bug or a broken client. Its message can contain anything.
    return _at(index, "backend", f"{label} could not be checked: {type(error).__name__}")
