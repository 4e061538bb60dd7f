"""A run as a document: the JSON that the submit form previews, and the content of ``run.toml``.

An omitted group setting has its default (:class:`~diloco.protocol.settings.GroupSettings`);
``num_replicas`` is the sum of the pools' counts. The domain validates the values, as it does for
the form, so that both report the same errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

from pydantic import ConfigDict, Field

from dashboard.api.evaluation_document import EvaluationDocument, plan_document, plan_draft
from dashboard.api.types import LARGE, NO_NUL, SMALL, Body
from diloco.protocol.settings import GroupSettings, SettingsError, setting_fields
from diloco.protocol.workload import GPT_SIZES, STDLIB, WORKLOADS, WorkloadDocument
from runs.exceptions import InvalidRun
from runs.queries import named
from runs.submit.evaluation_plans import MOST_PLANS
from runs.submit.run_draft import Fork, PlanDraft, PoolDraft, RunDraft
from runs.submit.tags import TAG_LENGTH, TAGS

Text = Annotated[str, Field(pattern=NO_NUL)]
Seconds = Annotated[int, Field(ge=0, le=366 * 86_400)]
Usd = Annotated[float, Field(ge=0, le=1e12)]

MOST_POOLS = 32


def _settings_schema(schema: dict[str, Any]) -> None:
    """Describe each group setting in the OpenAPI schema, in place of an arbitrary object."""
    kinds = {"int": "integer", "float": "number", "choice": "string"}
    schema.pop("additionalProperties", None)
    schema["additionalProperties"] = False
    schema["properties"] = {
        spec.name: {
            "type": kinds[spec.kind],
            "title": spec.label,
            "description": spec.help,
            "default": spec.default,
            **({"enum": list(spec.choices)} if spec.choices else {}),
            **({} if spec.minimum is None else {"minimum": spec.minimum}),
            **({"maximum": LARGE} if spec.maximum is None else {"maximum": spec.maximum}),
        }
        for spec in setting_fields()
    }
    for spec in setting_fields():
        if spec.kind == "choice":
            schema["properties"][spec.name].pop("maximum")


def _workload_schema(schema: dict[str, Any]) -> None:
    schema["properties"] = {
        "kind": {"type": "string", "enum": sorted(WORKLOADS), "default": "byte_gpt"},
        "size": {"type": "string", "enum": sorted(GPT_SIZES)},
        "data": {"type": "string", "default": STDLIB},
    }


class PoolDocument(Body):
    """``count`` replicas on one backend and hardware (``GET /api/backends`` lists them).

    ``credential`` is the name of a credential for that backend; by default the server's own
    environment is used. ``timeout_s`` 0 is the longest deadline that the backend allows.
    ``price_usd_h`` overrides the price list. Machines above ``max_price_usd_h`` are not launched.
    """

    model_config = ConfigDict(title="Pool document")

    backend: Annotated[Text, Field(max_length=32)] = "local"
    hardware: Annotated[Text, Field(max_length=64)] = "cpu"
    count: Annotated[int, Field(ge=1, le=1024)] = 1
    region: Annotated[Text, Field(max_length=64)] = ""
    spot: bool = False
    image: Annotated[Text, Field(max_length=300)] = ""
    timeout_s: Seconds = 0
    options: dict[str, Any] = Field(default_factory=dict)
    credential: (
        Annotated[Text, Field(max_length=80)] | Annotated[int, Field(ge=1, le=SMALL)] | None
    ) = None
    price_usd_h: Usd | None = None
    max_price_usd_h: Usd | None = None


class ForkDocument(Body):
    """Start from the checkpoint of ``round`` of another run; ``outer``: also restore the state of
    its outer optimizer."""

    model_config = ConfigDict(title="Fork document")

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
    round: Annotated[int, Field(ge=0, le=SMALL)]
    outer: bool = True


class RunDocument(Body):
    """``rendezvous`` is the URI of the run's own prefix; by default the server chooses one.
    ``store_credential`` is the name of a credential of kind ``store``. ``over_budget``: launch even
    though the estimate exceeds the budget, which will end the run. ``notify`` lists the names of
    the webhooks that receive its alerts; by default all do. ``trackers`` lists the names of the
    experiment trackers that its metrics are mirrored to. ``evaluations`` are measured of its
    checkpoints. Budgets of ``tags`` apply to the launch."""

    model_config = ConfigDict(title="Run document")

    name: Annotated[Text, Field(min_length=1, max_length=80)]
    settings: Annotated[dict[str, Any], Field(json_schema_extra=_settings_schema)] = Field(
        default_factory=dict
    )
    workload: Annotated[dict[str, Any], Field(json_schema_extra=_workload_schema)] = Field(
        default_factory=dict
    )
    pools: Annotated[list[PoolDocument], Field(min_length=1, max_length=MOST_POOLS)]
    rendezvous: Annotated[Text, Field(max_length=500)] = ""
    store_credential: (
        Annotated[Text, Field(max_length=80)] | Annotated[int, Field(ge=1, le=SMALL)] | None
    ) = None
    time_limit_s: Seconds = 0
    start_timeout_s: Seconds = 0
    budget_usd: Usd = 0.0
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    over_budget: bool = False
    fork: ForkDocument | None = None
    notify: (
        Annotated[
            list[Annotated[Text, Field(max_length=80)] | Annotated[int, Field(ge=1, le=SMALL)]],
            Field(max_length=100),
        ]
        | None
    ) = None
    trackers: Annotated[list[Annotated[Text, Field(max_length=80)]], Field(max_length=20)] = Field(
        default_factory=list
    )
    evaluations: Annotated[list[EvaluationDocument], Field(max_length=MOST_PLANS)] = Field(
        default_factory=list
    )
    tags: Annotated[list[Annotated[Text, Field(max_length=TAG_LENGTH)]], Field(max_length=TAGS)] = (
        Field(default_factory=list)
    )


def draft_of(document: RunDocument) -> RunDraft:
    """The draft of a document.

    Raises :class:`InvalidRun` with the field of an invalid value: ``settings.<name>``,
    ``workload.<name>`` or ``pools.<index>.<name>``.
    """
    pools = tuple(pool_draft(pool, index) for index, pool in enumerate(document.pools))
    workload, fork = _workload(document.workload), document.fork
    return RunDraft(
        name=document.name,
        settings=_settings(document.settings, sum(pool.count for pool in pools)),
        workload=workload,
        pools=pools,
        rendezvous=document.rendezvous.strip(),
        time_limit_s=document.time_limit_s,
        budget_usd=document.budget_usd,
        start_timeout_s=document.start_timeout_s,
        max_restarts=document.max_restarts,
        store_credential=named.credential_id(
            document.store_credential, "store", "store_credential"
        ),
        archive=_archive(getattr(workload, "archive", "")),
        fork=Fork(run=UUID(fork.run), round=fork.round, outer=fork.outer) if fork else None,
        notify=None if document.notify is None else named.webhook_ids(document.notify),
        trackers=named.tracker_ids(document.trackers),
        evaluations=_evaluations(document.evaluations),
        tags=tuple(document.tags),
    )


def document_of(draft: RunDraft) -> dict[str, Any]:
    """The document of a draft, with credentials by name: the inverse of :func:`draft_of`."""
    used = [pool.credential for pool in draft.pools]
    used += [plan.credential for plan in draft.evaluations]
    names = named.credential_names([draft.store_credential, *used])
    chosen = draft.notify
    trackers = named.trackers() if draft.trackers else {}
    body = draft.to_dict()
    for pool in body["pools"]:
        pool["credential"] = names.get(pool["credential"])
    return body | {
        "store_credential": names.get(draft.store_credential),
        "notify": None
        if chosen is None
        else [name for pk, name in named.webhooks().items() if pk in chosen],
        "trackers": [name for pk, name in trackers.items() if pk in draft.trackers],
        "evaluations": [plan_document(plan, names) for plan in draft.evaluations],
    }


def _evaluations(documents: Sequence[EvaluationDocument]) -> tuple[PlanDraft, ...]:
    drafts = []
    for index, document in enumerate(documents):
        try:
            drafts.append(plan_draft(document))
        except InvalidRun as error:
            raise InvalidRun(f"evaluations.{index}.{error.field}", error.message) from None
    return tuple(drafts)


def _archive(sha256: Any) -> bytes:
    if not isinstance(sha256, str) or not sha256:
        return b""
    archive = named.archive(sha256)
    if archive is None:
        raise InvalidRun(
            "workload.archive",
            "expected the sha256 of an uploaded archive (POST /api/archives), found "
            f"{sha256[:64]!r}",
        )
    return bytes(archive.data)


def pool_draft(document: PoolDocument, index: int = 0) -> PoolDraft:
    values = document.model_dump()
    values["credential"] = named.credential_id(
        document.credential, document.backend, f"pools.{index}.credential"
    )
    return PoolDraft(**values)


def _settings(sent: Mapping[str, Any], replicas: int) -> GroupSettings:
    values = {spec.name: spec.default for spec in setting_fields()} | {"num_replicas": replicas}
    try:
        return GroupSettings.from_dict(values | dict(sent))
    except SettingsError as error:
        raise InvalidRun(f"settings.{error.field}", error.message) from None


def _workload(sent: Mapping[str, Any]) -> WorkloadDocument:
    values = {"kind": "byte_gpt"} | dict(sent)
    kind = values["kind"]
    workload = WORKLOADS.get(kind) if isinstance(kind, str) else None
    if workload is None:
        raise InvalidRun(
            "workload.kind", f"expected one of {', '.join(sorted(WORKLOADS))}, found {kind!r}"
        )
    try:
        return workload.from_dict(values)
    except SettingsError as error:
        field = "workload" if error.field in ("", "workload") else f"workload.{error.field}"
        raise InvalidRun(field, error.message) from None
    except TypeError as error:
        raise InvalidRun("workload", f"expected values of the right types, found {error}") from None
