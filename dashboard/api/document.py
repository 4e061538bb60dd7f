"""A run as a document: what the form's effective JSON shows, and what ``run.toml`` holds.

Left out, a group setting has its default (:class:`~diloco.protocol.settings.GroupSettings`) and
``num_replicas`` is what the pools add up to. Values are checked where the form has them checked, by
the domain, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, cast
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from dashboard.api.types import LARGE, NO_NUL, SMALL
from diloco.protocol.settings import GroupSettings, SettingsError, setting_fields
from diloco.protocol.workload import GPT_SIZES, STDLIB, WORKLOADS
from runs.exceptions import InvalidRun
from runs.models import Archive, Credential, Webhook
from runs.submit.run_draft import Fork, PoolDraft, RunDraft

Text = Annotated[str, Field(pattern=NO_NUL)]
Seconds = Annotated[int, Field(ge=0, le=366 * 86_400)]
Usd = Annotated[float, Field(ge=0, le=1e12)]

MOST_POOLS = 32


def _settings_schema(schema: dict[str, Any]) -> None:
    """Each group setting as it is, in place of "an object"."""
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


class PoolDocument(BaseModel):
    """``count`` replicas on one backend and hardware (``GET /api/backends`` lists them).

    ``credential`` is the name of one for that backend; left out, the server's own environment.
    ``timeout_s`` 0 is the longest deadline the backend allows. ``price_usd_h`` replaces the list's;
    what costs more than ``max_price_usd_h`` is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, title="Pool document")

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


class ForkDocument(BaseModel):
    """Begin with the checkpoint of ``round`` of another run; ``outer``: with the state of its outer
    optimizer too."""

    model_config = ConfigDict(extra="forbid", strict=True, title="Fork document")

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
    round: Annotated[int, Field(ge=0, le=SMALL)]
    outer: bool = True


class RunDocument(BaseModel):
    """``rendezvous`` is the URI of the run's own prefix; left out, the server chooses.
    ``store_credential`` is the name of one of kind ``store``. ``over_budget``: launch although the
    estimate is above the budget, which will end the run. ``notify`` are the names of the webhooks
    that are told of its alerts; left out, all."""

    model_config = ConfigDict(extra="forbid", strict=True, title="Run document")

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


def draft_of(document: RunDocument) -> RunDraft:
    """:class:`InvalidRun` or :class:`SettingsError` where a value is not what it should be, with
    ``settings.<name>``, ``workload.<name>`` or ``pools.<index>.<name>``."""
    pools = tuple(pool_draft(pool, place) for place, pool in enumerate(document.pools))
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
        store_credential=_credential(document.store_credential, "store", "store_credential"),
        archive=_archive(getattr(workload, "archive", "")),
        fork=Fork(run=UUID(fork.run), round=fork.round, outer=fork.outer) if fork else None,
        notify=None if document.notify is None else _webhooks(document.notify),
    )


def document_of(draft: RunDraft) -> dict[str, Any]:
    """What :func:`draft_of` makes the draft of again, with credentials by name."""
    used = (draft.store_credential, *(pool.credential for pool in draft.pools))
    known = Credential.objects.filter(pk__in=[pk for pk in used if pk is not None])
    names: dict[int | None, str] = {row.pk: row.name for row in known}
    body = {field.name: getattr(draft, field.name) for field in fields(draft)}
    del body["archive"]  # the workload names it
    return body | {
        "settings": draft.settings.to_dict(),
        "workload": draft.workload.to_dict(),
        "pools": [
            {**asdict(pool), "credential": names.get(pool.credential)} for pool in draft.pools
        ],
        "store_credential": names.get(draft.store_credential),
        "notify": None if draft.notify is None else _names(draft.notify),
        "fork": draft.fork and {**asdict(draft.fork), "run": str(draft.fork.run)},
    }


def _names(ids: tuple[int, ...]) -> list[str]:
    return list(Webhook.objects.filter(pk__in=ids).values_list("name", flat=True))


def _webhooks(wanted: list[str | int]) -> tuple[int, ...]:
    """Ids of webhooks by their names, or by their ids, as the form has them."""
    known = {name: pk for pk, name in Webhook.objects.values_list("pk", "name")}
    for place, one in enumerate(wanted):
        if one not in known and one not in known.values():
            raise InvalidRun(
                f"notify.{place}",
                f"expected a webhook ({', '.join(known) or 'none yet'}), found {one!r}",
            )
    return tuple(known[one] if isinstance(one, str) else one for one in wanted)


def _archive(sha256: Any) -> bytes:
    if not isinstance(sha256, str) or not sha256:
        return b""
    found = Archive.objects.filter(pk=sha256).first()
    if found is None:
        raise InvalidRun(
            "workload.archive",
            "expected the sha256 of an archive that was uploaded (POST /api/archives), found "
            f"{sha256[:64]!r}",
        )
    return bytes(found.data)


def pool_draft(document: PoolDocument, place: int = 0) -> PoolDraft:
    values = document.model_dump()
    values["credential"] = _credential(
        document.credential, document.backend, f"pools.{place}.credential"
    )
    return PoolDraft(**values)


def _settings(given: Mapping[str, Any], replicas: int) -> GroupSettings:
    values = {spec.name: spec.default for spec in setting_fields()} | {"num_replicas": replicas}
    try:
        return GroupSettings.from_dict(values | dict(given))
    except SettingsError as error:
        raise InvalidRun(f"settings.{error.field}", error.message) from None


def _workload(given: Mapping[str, Any]) -> Any:
    values = {"kind": "byte_gpt"} | dict(given)
    kind = values["kind"]
    found = WORKLOADS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise InvalidRun(
            "workload.kind", f"expected one of {', '.join(sorted(WORKLOADS))}, found {kind!r}"
        )
    try:
        return cast(Any, found).from_dict(values)
    except SettingsError as error:
        field = "workload" if error.field in ("", "workload") else f"workload.{error.field}"
        raise InvalidRun(field, error.message) from None
    except TypeError as error:
        raise InvalidRun("workload", f"expected values of their types, found {error}") from None


def _credential(wanted: str | int | None, kind: str, field: str) -> int | None:
    """The id of the credential of that name, or of that id, as the form has it."""
    if wanted is None or wanted == "":
        return None
    key = {"pk": wanted} if isinstance(wanted, int) else {"name": wanted}
    found = Credential.objects.filter(kind=kind, **key).first()
    if found is None:
        known = ", ".join(Credential.objects.filter(kind=kind).values_list("name", flat=True))
        raise InvalidRun(
            field, f"expected a credential for {kind} ({known or 'none yet'}), found {wanted!r}"
        )
    return found.pk
