"""Numbers for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/

Sums over all runs cost a constant number of queries. Series of single runs are of those that are
active only, so that an old server has no more of them than a new one.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Count, Max, Sum
from django.utils import timezone
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runs.backends import health
from runs.models import IngestState, QuarantinedRecord, Replica, Run
from runs.queries.selectors import run_header, with_header
from runs.states import RUN_ACTIVE, RUN_ENDED, RUN_LIVE, RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_RUNS = 200
"""Active runs with series of their own, the newest."""


def exposition() -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    return generate_latest(registry)


class _Collector(Collector):
    def describe(self) -> Iterable[Metric]:
        return ()  # asked without a database, when it is registered

    def collect(self) -> Iterable[Metric]:
        yield _runs()
        yield _replicas()
        yield from _totals()
        yield from _freshness()
        yield from _of_active_runs()


def _gauge(name: str, help: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"archipelago_{name}", help, labels=labels)


def _gauge_of(name: str, help: str, value: float) -> Metric:
    metric = _gauge(name, help)
    metric.add_metric([], value)
    return metric


def _runs() -> Metric:
    found = dict(Run.objects.order_by().values_list("state").annotate(Count("pk")))
    metric = _gauge("runs", "Runs by state.", ("state",))
    for state in RunState.values:
        metric.add_metric([state], found.get(state, 0))
    return metric


def _replicas() -> Metric:
    rows = (
        Replica.objects.exclude(run__state__in=RUN_ENDED)
        .order_by()
        .values_list("pool__backend", "state")
        .annotate(Count("pk"))
    )
    metric = _gauge(
        "replicas", "Replicas of runs that are not over, by backend and state.",
        ("backend", "state"),
    )  # fmt: skip
    for backend, state, count in rows:
        metric.add_metric([backend, state], count)
    return metric


def _totals() -> Iterable[Metric]:
    sums = Run.objects.aggregate(
        tokens=Sum("tokens"), usd=Sum("cost_usd"), up=Sum("bytes_up"), down=Sum("bytes_down"),
        rounds=Sum("committed_rounds"), refused=Sum("refused_records"),
    )  # fmt: skip
    told = {
        "tokens": ("tokens", "Tokens trained on, all runs."),
        "cost_usd": ("usd", "Estimated cost of all attempts with a known price, in US dollars."),
        "rounds": ("rounds", "Rounds committed, all runs."),
        "refused_records": ("refused", "Records of replicas that could not be read."),
    }
    for name, (column, help) in told.items():
        yield CounterMetricFamily(f"archipelago_{name}", help, value=sums[column] or 0)
    quarantined = QuarantinedRecord.objects.filter(quarantined_at__isnull=False).count()
    yield _gauge_of("quarantined_records", "Records that failed and are skipped.", quarantined)
    unreachable = IngestState.objects.filter(run__state__in=RUN_ACTIVE).exclude(trouble="")
    yield _gauge_of(
        "unreadable_runs", "Active runs whose bucket cannot be read.", unreachable.count()
    )
    moved = CounterMetricFamily(
        "archipelago_bytes", "Bytes replicas moved through stores.", labels=("direction",)
    )
    moved.add_metric(["up"], sums["up"] or 0)
    moved.add_metric(["down"], sums["down"] or 0)
    yield moved


def _freshness() -> Iterable[Metric]:
    oldest_s = 0.0
    now = timezone.now()
    seen = Run.objects.filter(state__in=RUN_LIVE, last_seen_at__isnull=False)
    for last_seen_at in seen.values_list("last_seen_at", flat=True):
        assert last_seen_at is not None
        oldest_s = max(oldest_s, (now - last_seen_at).total_seconds())
    age = _gauge(
        "telemetry_age_seconds", "Age of the newest telemetry of the live run that is worst."
    )
    age.add_metric([], oldest_s)
    yield age
    lag = _gauge(
        "ingest_lag_seconds",
        "Seconds since ingest was last up to date, of the active run that is worst.",
    )
    lag.add_metric([], max(ingest_lags().values(), default=0.0))
    yield lag
    workers = (
        ("worker", health.HEARTBEAT), ("ingest", health.INGEST), ("launch", health.LAUNCH),
    )  # fmt: skip
    for name, key in workers:
        beat = _gauge(
            f"{name}_heartbeat_age_seconds",
            f"Since the {'control' if name == 'worker' else name} worker last took a tick.",
        )
        age_s = health.heartbeat_age_s(key)
        if age_s is not None:
            beat.add_metric([], age_s)
        yield beat
    newest = Run.objects.aggregate(at=Max("created_at"))["at"]
    made = _gauge("newest_run_timestamp_seconds", "When the newest run was submitted.")
    if newest is not None:
        made.add_metric([], newest.timestamp())
    yield made


def ingest_lags() -> dict[str, float]:
    """Id of each active run whose bucket is read -> seconds since ingest was last up to date. A run
    whose bucket cannot be read is late as well. One query."""
    now = timezone.now()
    states = IngestState.objects.filter(run__state__in=RUN_ACTIVE)
    rows = states.values_list("run_id", "caught_up_at", "run__started_at", "run__created_at")
    return {
        str(run_id): max((now - (caught_up or started or created)).total_seconds(), 0.0)
        for run_id, caught_up, started, created in rows
    }


_PER_RUN = {
    "committed_rounds": "Rounds committed.",
    "total_rounds": "Rounds wanted.",
    "tokens": "Tokens trained on.",
    "tokens_per_s": "Tokens per second.",
    "train_loss": "Newest training loss.",
    "eval_loss": "Newest evaluation loss.",
    "live": "Replicas at work.",
    "target": "Replicas wanted.",
    "quorum": "Replicas a round needs.",
    "goodput": "Share of time spent on computing.",
    "cost_usd": "Estimated cost so far, in US dollars.",
}


def _of_active_runs() -> Iterable[Metric]:
    active = with_header(Run.objects.filter(state__in=RUN_ACTIVE)).order_by("-created_at")
    headers = [run_header(run) for run in active[:MOST_RUNS]]
    for column, help in _PER_RUN.items():
        metric = _gauge(f"run_{column}", f"{help} Active runs only.", ("run", "name"))
        for header in headers:
            if header[column] is not None:
                metric.add_metric([header["id"], header["name"]], header[column])
        yield metric
    lags = ingest_lags()
    lag = _gauge(
        "run_ingest_lag_seconds", "Seconds since ingest was last up to date. Active runs only.",
        ("run", "name"),
    )  # fmt: skip
    for header in headers:
        if header["id"] in lags:
            lag.add_metric([header["id"], header["name"]], lags[header["id"]])
    yield lag
