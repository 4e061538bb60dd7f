"""Metrics for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/

Sums over all runs cost a constant number of queries. Only active runs have separate series, so
that the number of series does not grow with the age of a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
"""Number of active runs, newest first, that have separate series."""


def exposition() -> bytes:
    """The response body of the metrics endpoint."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    return generate_latest(registry)


class _Collector(Collector):
    def describe(self) -> Iterable[Metric]:
        return ()  # registration must not query the database

    def collect(self) -> Iterable[Metric]:
        yield _runs()
        yield _replicas()
        yield from _totals()
        yield from _freshness()
        yield from _of_active_runs()


Samples = Iterable[tuple[Sequence[str], float | None]]
"""(values of the labels, value). Without a value there is no sample."""


def _gauge(name: str, help: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    metric = GaugeMetricFamily(f"archipelago_{name}", help, labels=labels)
    for values, value in samples:
        if value is not None:
            metric.add_metric(values, value)
    return metric


def _runs() -> Metric:
    counts = dict(Run.objects.order_by().values_list("state").annotate(Count("pk")))
    samples = (([state], counts.get(state, 0)) for state in RunState.values)
    return _gauge("runs", "Runs by state.", samples, ["state"])


def _replicas() -> Metric:
    rows = (
        Replica.objects.exclude(run__state__in=RUN_ENDED)
        .order_by()
        .values_list("pool__backend", "state")
        .annotate(Count("pk"))
    )
    help = "Replicas of runs that have not ended, by backend and state."
    samples = (([backend, state], count) for backend, state, count in rows)
    return _gauge("replicas", help, samples, ["backend", "state"])


def _totals() -> Iterable[Metric]:
    sums = Run.objects.aggregate(
        tokens=Sum("tokens"),
        usd=Sum("cost_usd"),
        up=Sum("bytes_up"),
        down=Sum("bytes_down"),
        rounds=Sum("committed_rounds"),
        refused=Sum("refused_records"),
    )
    counters = {
        "tokens": ("tokens", "Tokens trained on, all runs."),
        "cost_usd": ("usd", "Estimated cost of all attempts with a known price, in US dollars."),
        "rounds": ("rounds", "Rounds committed, all runs."),
        "refused_records": ("refused", "Records of replicas that could not be read."),
    }
    for name, (column, help) in counters.items():
        yield CounterMetricFamily(f"archipelago_{name}", help, value=sums[column] or 0)
    quarantined = QuarantinedRecord.objects.filter(quarantined_at__isnull=False).count()
    help = "Records that failed and are skipped."
    yield _gauge("quarantined_records", help, [([], quarantined)])
    unreachable = IngestState.objects.filter(run__state__in=RUN_ACTIVE).exclude(trouble="")
    help = "Active runs whose bucket cannot be read."
    yield _gauge("unreadable_runs", help, [([], unreachable.count())])
    traffic = CounterMetricFamily(
        "archipelago_bytes", "Bytes that replicas moved through stores.", labels=("direction",)
    )
    traffic.add_metric(["up"], sums["up"] or 0)
    traffic.add_metric(["down"], sums["down"] or 0)
    yield traffic


def _freshness() -> Iterable[Metric]:
    oldest_s = 0.0
    now = timezone.now()
    seen = Run.objects.filter(state__in=RUN_LIVE, last_seen_at__isnull=False)
    for last_seen_at in seen.values_list("last_seen_at", flat=True):
        assert last_seen_at is not None
        oldest_s = max(oldest_s, (now - last_seen_at).total_seconds())
    help = "Age of the newest telemetry, maximum over live runs."
    yield _gauge("telemetry_age_seconds", help, [([], oldest_s)])
    help = "Seconds since ingest was last up to date, maximum over active runs."
    yield _gauge("ingest_lag_seconds", help, [([], max(ingest_lags().values(), default=0.0))])
    for name, worker, key in (
        ("worker", "control", health.HEARTBEAT),
        ("ingest", "ingest", health.INGEST),
        ("launch", "launch", health.LAUNCH),
    ):
        help = f"Seconds since the last tick of the {worker} worker."
        yield _gauge(f"{name}_heartbeat_age_seconds", help, [([], health.heartbeat_age_s(key))])
    newest = Run.objects.aggregate(at=Max("created_at"))["at"]
    help = "Submission time of the newest run."
    yield _gauge("newest_run_timestamp_seconds", help, [([], newest and newest.timestamp())])


def ingest_lags() -> dict[str, float]:
    """ID of each active run -> seconds since ingest was last up to date. One query.

    A run whose bucket cannot be read is late as well.
    """
    now = timezone.now()
    states = IngestState.objects.filter(run__state__in=RUN_ACTIVE)
    rows = states.values_list("run_id", "caught_up_at", "run__started_at", "run__created_at")
    return {
        str(run_id): max((now - (caught_up or started or created)).total_seconds(), 0.0)
        for run_id, caught_up, started, created in rows
    }


_PER_RUN = {
    "committed_rounds": "Rounds committed.",
    "total_rounds": "Target number of rounds.",
    "tokens": "Tokens trained on.",
    "tokens_per_s": "Tokens per second.",
    "train_loss": "Latest training loss.",
    "eval_loss": "Latest evaluation loss.",
    "live": "Live replicas.",
    "target": "Target number of replicas.",
    "quorum": "Replicas that a round needs.",
    "goodput": "Share of time spent computing.",
    "cost_usd": "Estimated cost so far, in US dollars.",
    "ingest_lag_seconds": "Seconds since ingest was last up to date.",
}


def _of_active_runs() -> Iterable[Metric]:
    active = with_header(Run.objects.filter(state__in=RUN_ACTIVE)).order_by("-created_at")
    headers = [run_header(run) for run in active[:MOST_RUNS]]
    lags = ingest_lags()
    for header in headers:
        header["ingest_lag_seconds"] = lags.get(header["id"])
    for column, help in _PER_RUN.items():
        samples = (([header["id"], header["name"]], header[column]) for header in headers)
        yield _gauge(f"run_{column}", f"{help} Active runs only.", samples, ["run", "name"])
