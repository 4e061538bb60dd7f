"""What the API answers with. The rows are those that pages and live stream have
(:mod:`runs.queries.selectors`, :mod:`runs.queries.fleet`); here they have types, so that OpenAPI
can tell of them.

Times are ISO 8601 in UTC. What is not known is null, and so is a number that is not finite.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Row(BaseModel):
    """A row may have more than its type says: a newer server tells more."""

    model_config = ConfigDict(extra="allow")


class RunHeader(Row):
    id: str
    name: str
    state: str
    state_reason: str
    state_since: str | None
    owner: str
    committed_rounds: int
    total_rounds: int
    tokens: int
    tokens_per_s: float | None
    train_loss: float | None
    eval_loss: float | None
    live: int
    alerts: int
    quorum: int
    target: int
    eta_s: float | None
    created_at: str | None
    started_at: str | None
    ended_at: str | None
    last_seen_at: str | None
    goodput: float | None
    bytes_up: int
    bytes_down: int
    cost_usd: float
    cost_known: bool
    budget_usd: float


class RunPage(BaseModel):
    """``next`` is what ``before`` has to be for the page after this one; null on the last."""

    runs: list[RunHeader]
    next: str | None


class View(BaseModel):
    """What ``/?q=…&sort=…&columns=…&differ=1`` shows. ``columns`` is empty for those shown to
    everybody."""

    id: int
    name: str
    owner: str
    mine: bool
    shared: bool
    query: str
    sort: str
    columns: list[str]
    differing: bool


class Views(BaseModel):
    views: list[View]


class Pool(Row):
    id: int
    backend: str
    name: str
    hardware: str
    region: str
    spot: bool
    credential: str | None
    timeout_s: int
    wanted: int
    live: int
    ended: int
    price_usd_h: float | None
    max_price_usd_h: float | None
    cost_usd: float | None
    cost_known: bool


class Run(RunHeader):
    """A run with what it was made of."""

    rendezvous: str
    settings: dict[str, Any]
    workload: dict[str, Any]
    fingerprint: str | None
    code: str | None
    time_limit_s: int
    start_timeout_s: int
    max_restarts: int
    store_credential: str | None
    notes: str
    tags: list[str]
    archived: bool
    may_operate: bool
    pools: list[Pool]


class Replica(Row):
    number: int
    state: str
    state_reason: str
    pool: int
    backend: str
    backend_state: str
    attempt: int
    deadline_at: str | None
    cost_usd: float | None
    beat_at: str | None
    round: int
    step: int
    tokens: int
    loss: float | None
    tokens_per_s: float | None
    wait_fraction: float | None
    gpu_busy: float | None
    gpu_memory_bytes: float | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    restarts: int
    device: str
    host: str


class Attempt(Row):
    number: int
    launch_key: str
    job: dict[str, Any]
    cause: str
    exit_code: int | None
    message: str
    created_at: str | None
    launched_at: str | None
    started_at: str | None
    ended_at: str | None
    deadline_at: str | None
    price_usd_h: float | None
    cost_usd: float | None


class ReplicaDetail(Replica):
    attempts: list[Attempt]


class Contribution(Row):
    """``late_s``: seconds from the round's plan to a late one, by the two machines' clocks."""

    replica: int
    state: str
    reason: str
    late_s: float | None
    base_round: int
    norm: float | None
    update_norm: float | None
    cosine: float | None
    size_bytes: int
    bytes_up: int
    bytes_down: int
    requests: int
    phases: dict[str, float]
    started_at: str | None
    committed_at: str | None


class Round(Row):
    """``healing`` are the replicas that were catching up and so gave nothing."""

    number: int
    fragment: int
    state: str
    reason: str
    contributors: int
    mode: str
    committed_at: str | None
    loss: float | None
    eval_loss: float | None
    tokens_total: int
    weights_digest: str
    digest_mismatch: bool
    healing: list[int]
    contributions: list[Contribution]


class Event(Row):
    id: int
    at: str | None
    level: str
    kind: str
    replica: int | None
    actor: str | None
    from_state: str
    to_state: str
    message: str


class LogLine(Row):
    id: int
    at: str | None
    replica: int
    level: str
    message: str


class BackendLog(BaseModel):
    """``position`` is ``after`` of the next call; ``cut``: there was more than is here."""

    lines: list[Any]
    position: str
    cut: bool
    unknown: str
    ended: bool


class Series(BaseModel):
    series: str
    replica: int | None


class Points(Row):
    """Columns of one length. ``nonfinite`` are ``[index, "nan" | "inf" | "-inf"]`` of values that
    are null; ``total`` is how many points there were before thinning, which keeps extremes."""

    series: str
    replica: int | None
    step: list[int]
    round: list[int]
    tokens: list[int]
    wall_s: list[float]
    value: list[float | None]
    nonfinite: list[Any]
    total: int


class Sample(BaseModel):
    """Text that the final weights go on with from ``prompt``; ``whole`` false: time was over."""

    round: int
    prompt: str
    text: str
    temperature: float | None
    seed: int
    whole: bool


class Checkpoint(BaseModel):
    round: int
    final: bool
    key: str
    size_bytes: int
    digest: str
    created_at: str | None
    sample: Sample | None


class Alert(Row):
    id: int
    kind: str
    title: str
    subject: str
    replica: int | None
    level: str
    message: str
    first_at: str | None
    opened_at: str | None
    closed_at: str | None
    times: int
    acknowledged_at: str | None
    acknowledged_by: str | None


class Archive(BaseModel):
    sha256: str
    size_bytes: int


class Info(Row):
    """``group.json`` and what a client has to expect of it. ``model_hash`` is ``pending`` until
    checkpoint 0 has fixed it, and ``code`` and ``fingerprint`` until the launch has."""

    format: str
    protocol: int
    run_id: str
    name: str
    settings: dict[str, Any]
    workload: dict[str, Any]
    code: str
    fingerprint: str
    expected_client_settings: dict[str, Any]
    settings_authority: str
    model_hash: str


class Estimate(Row):
    """Of somebody's own code nobody knows how large its model is: what follows from it is null."""

    parameters: int | None
    reduce_plan: str
    up_bytes_per_round: int | None
    down_bytes_per_round: int | None
    total_bytes: int | None
    rounds: int
    steps: int
    tokens: int | None
    tokens_per_round: int | None
    reduction: float | None
    replicas: int
    pool_usd_h: list[float | None]
    usd_h: float | None
    usd: float | None
    usd_text: str


class Hardware(BaseModel):
    name: str
    label: str
    gpu_memory_gib: float | None
    cpus: float | None
    memory_gib: float | None
    price_usd_h: float | None
    spot_price_usd_h: float | None


class Backend(BaseModel):
    """``credentials`` are names, for those who may submit."""

    name: str
    label: str
    hardware: list[Hardware]
    credentials: list[str]


class Setting(BaseModel):
    name: str
    label: str
    help: str
    section: str
    kind: str
    default: Any
    unit: str
    minimum: float | None
    maximum: float | None
    choices: list[str]


class Me(BaseModel):
    user: str
    role: str
    scopes: list[str]
    version: str


class Done(BaseModel):
    """``changed`` is false where nothing was left to do. ``state`` is what it is in now."""

    changed: bool
    state: str


class DeletedPart(BaseModel):
    """Objects of one kind, such as ``checkpoint``, and their bytes."""

    kind: str
    objects: int
    size_bytes: int


class DeletionPlan(BaseModel):
    """What a deletion with objects would delete and keep. ``kept_names`` are the first of the
    ``kept`` objects; ``whole`` is false where there are more objects than were listed; ``refusal``
    says why none would be deleted."""

    deleted: list[DeletedPart]
    objects: int
    size_bytes: int
    kept: int
    kept_bytes: int
    kept_names: list[str]
    whole: bool
    refusal: str


class Scaled(BaseModel):
    """``change`` is how many replicas more (or, below 0, fewer) the pool has now."""

    change: int
    wanted: int
