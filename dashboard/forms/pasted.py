"""Fill the submit form from a document: what a browser would post for it.

The form then validates the values, so that an error of the document is shown at its field. Only
what no field can show, such as an unknown name, is reported beside the document.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from django.http import QueryDict

from dashboard.forms.custom import CUSTOM
from dashboard.forms.fields import write_seconds
from dashboard.forms.huggingface import HF
from dashboard.forms.pools import ROWS, PoolForm
from dashboard.forms.run import FIELDS, GPT, RunForm
from diloco.protocol.settings import GroupSettings, setting_fields
from diloco.protocol.workload import SHARDS, STDLIB, WORKLOADS, ByteGPTWorkload
from executors.base import Problem
from runs.exceptions import InvalidRun
from runs.queries import named
from runs.submit.evaluation_plans import MOST_PLANS
from runs.submit.run_draft import PlanDraft, PoolDraft, RunDraft
from runs.submit.sweep_space import DERIVED
from runs.submit.tags import EXPECTED, TAG_LENGTH

_SECONDS = ("time_limit_s", "start_timeout_s")
_PLAIN = ("name", "rendezvous", "budget_usd", "max_restarts", "over_budget")
_KNOWN = (
    *_PLAIN,
    *_SECONDS,
    "settings",
    "workload",
    "pools",
    "store_credential",
    "fork",
    "notify",
    "trackers",
    "evaluations",
    "tags",
)
_POOL = tuple(PoolDraft.__dataclass_fields__)

MOST_PROBLEMS = 20
OMITTED = RunDraft(
    name="", settings=GroupSettings(), workload=ByteGPTWorkload(), pools=(PoolDraft(),)
)
"""The values that a document has where it omits them."""


def posted(form: RunForm) -> dict[str, Any]:
    """The values of a form by input name, as a browser posts them."""
    fields = [*form, *(field for pool in form.pools for field in pool)]
    return {
        field.html_name: [str(item) for item in value] if isinstance(value, list) else str(value)
        for field in fields
        if (value := field.value()) not in (None, False)
    }


def fill(
    document: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[QueryDict, list[Problem]]:
    """Return the values that a browser posts for ``document``, and problems that no field can show.

    ``defaults`` are the values (:func:`posted`) of everything that the document omits.
    """
    problems = _Problems()
    values = {name: value for name, value in defaults.items() if not name.startswith("pools.")} | {
        "name": ""
    }
    problems.unknown("", document, _KNOWN)
    for name in _PLAIN:
        if name in document:
            values[name] = _text(document[name])
    for name in _SECONDS:
        if name in document:
            values[name] = _duration(document[name])
    values |= _settings(document, problems)
    values |= _workload(document, problems)
    pools = _list(document, "pools", problems)
    if not pools:
        problems.add("pools", "expected at least one pool of replicas, found none")
    for index, pool in enumerate(pools[:ROWS]):
        values |= _pool(pool, index, problems)
    plans = _list(document, "evaluations", problems)
    if len(plans) > MOST_PLANS:
        problems.add("evaluations", f"expected at most {MOST_PLANS}, found {len(plans)}")
    for index, plan in enumerate(plans[:MOST_PLANS]):
        values |= _evaluation(plan, index, problems)
    values["tags"] = " ".join(_tags(document, problems))
    with problems:
        values["store_credential"] = _credential(document, "store", "store_credential")
    with problems:
        if document.get("notify") is not None:
            chosen = [_name(item) for item in _list(document, "notify", problems)]
            values["notify"] = [str(pk) for pk in named.webhook_ids(chosen)]
    with problems:
        trackers = [_text(item) for item in _list(document, "trackers", problems)]
        values["trackers"] = [str(pk) for pk in named.tracker_ids(trackers)]
    if isinstance(fork := document.get("fork"), Mapping):
        problems.unknown("fork", fork, ("run", "round", "outer"))
        values |= {"fork_run": _text(fork.get("run")), "fork_round": _text(fork.get("round"))}
        values |= {"fork_outer": "on"} if fork.get("outer", True) else {}
    return _query(values), problems.found[:MOST_PROBLEMS]


class _Problems:
    """Collects problems; as a context it catches those that the domain raises."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, field: str, message: str) -> None:
        self.found.append(Problem(field=field, message=message))

    def unknown(self, where: str, part: Mapping[str, Any], known: Iterable[str]) -> None:
        for name in part:
            if name not in known:
                field = f"{where}.{name}" if where else str(name)
                self.add(field[:80], "expected no such field")

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, InvalidRun):
            return False
        self.found.extend(error.problems)
        return True


def _settings(document: Mapping[str, Any], problems: _Problems) -> dict[str, Any]:
    settings = _mapping(document, "settings", problems)
    known = {spec.name: spec for spec in setting_fields()}
    problems.unknown("settings", settings, known)
    values = {
        name: _text(settings.get(name, spec.default))
        for name, spec in known.items()
        if name not in DERIVED
    }
    together = settings.get("start_replicas", 0)
    quorum = settings.get("min_quorum", known["min_quorum"].default)
    pools = document.get("pools")
    total = sum(map(_count, pools)) if isinstance(pools, list) else 0
    starts = {total: "all", 0: "wait"}
    if _is_whole(quorum):
        starts = {quorum: "quorum"} | starts
    if _is_whole(together) and together in starts:
        values["start"] = starts[together]
    else:
        expected = f"0, the quorum ({_text(quorum)[:20]}) or all {total} replicas"
        found = _text(together)[:40]
        problems.add("settings.start_replicas", f"expected {expected}, found {found}")
    return values


def _count(pool: Any) -> int:
    count = pool.get("count", 1) if isinstance(pool, Mapping) else 1
    return count if _is_whole(count) else 1


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _workload(document: Mapping[str, Any], problems: _Problems) -> dict[str, Any]:
    workload = _mapping(document, "workload", problems)
    kind = workload.get("kind", GPT)
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        expected = ", ".join(sorted(FIELDS))
        problems.add("workload.kind", f"expected one of {expected}, found {kind!r}")
        return {}
    known = {field.name for field in dataclasses.fields(WORKLOADS[kind])}
    problems.unknown("workload", workload, {*known, "kind"})
    values = {name: _text(workload[name]) for name in set(fields) & set(workload) - {"archive"}}
    if kind == CUSTOM:
        values["archive_sha256"] = _text(workload.get("archive", ""))
        if isinstance(lines := workload.get("requirements"), list):
            values["requirements"] = "\n".join(map(_text, lines))
    if kind in (GPT, HF):
        values |= _data(workload)
    return values | {"workload": kind}


def _data(workload: Mapping[str, Any]) -> dict[str, str]:
    """The source of the data, which the form chooses before its URI."""
    data = _text(workload.get("data", STDLIB))
    if workload.get("data_format") == SHARDS:
        return {"data_source": "shards", "data": data, "data_format": "auto"}
    if data == STDLIB:
        return {"data_source": "stdlib", "data": ""}
    return {"data_source": "uri", "data": data}


def _evaluation(plan: Any, index: int, problems: _Problems) -> dict[str, Any]:
    where = f"evaluations.{index}"
    if not isinstance(plan, Mapping):
        problems.add(where, f"expected an object, found {_text(plan)[:40]}")
        plan = {}
    omitted = PlanDraft(name="").to_dict()
    problems.unknown(where, plan, omitted)
    values = omitted | {name: value for name, value in plan.items() if name in omitted}
    backend = _text(values.pop("backend"))
    shown = {name: _text(value) for name, value in values.items()}
    if isinstance(values["tasks"], list):
        shown["tasks"] = ", ".join(map(_text, values["tasks"]))
    shown["where"] = f"{backend}:{shown.pop('hardware')}"
    shown["timeout_s"] = _duration(values["timeout_s"])
    shown["credential"] = ""
    with problems:
        shown["credential"] = _credential(plan, backend, f"{where}.credential")
    return {f"{where}.{name}": value for name, value in shown.items()}


def _pool(pool: Any, index: int, problems: _Problems) -> dict[str, Any]:
    where = f"pools.{index}"
    if not isinstance(pool, Mapping):
        problems.add(where, f"expected an object, found {_text(pool)[:40]}")
        pool = {}
    problems.unknown(where, pool, _POOL)
    drafted = PoolDraft()
    values = {
        name: getattr(drafted, name) for name in _POOL if getattr(drafted, name) is not None
    } | {name: value for name, value in pool.items() if name in _POOL}
    backend = _text(values["backend"])
    shown = {name: _text(value) for name, value in values.items() if name in PoolForm.base_fields}
    shown["hardware"] = f"{backend}:{_text(values['hardware'])}"
    shown["timeout_s"] = _duration(values["timeout_s"])
    shown["credential"] = ""
    with problems:
        shown["credential"] = _credential(pool, backend, f"{where}.credential")
    if not values["spot"]:
        del shown["spot"]
    return {f"{where}.{name}": value for name, value in shown.items()}


def _credential(part: Mapping[str, Any], kind: str, field: str) -> str:
    wanted = part.get(field.rpartition(".")[2])
    pk = named.credential_id(None if wanted is None else _name(wanted), kind, field)
    return "" if pk is None else str(pk)


def _name(value: Any) -> str | int:
    """A name or an id; another value as text, which names nothing."""
    return value if _is_whole(value) and abs(value) < 2**31 else _text(value)


def _mapping(document: Mapping[str, Any], name: str, problems: _Problems) -> Mapping[str, Any]:
    part = document.get(name) or {}
    if isinstance(part, Mapping):
        return part
    problems.add(name, f"expected an object, found {_text(part)[:40]}")
    return {}


def _list(document: Mapping[str, Any], name: str, problems: _Problems) -> list[Any]:
    part = document.get(name) or []
    if isinstance(part, list):
        return part
    problems.add(name, f"expected a list, found {_text(part)[:40]}")
    return []


def _tags(document: Mapping[str, Any], problems: _Problems) -> list[str]:
    """The tags as words of the field, which refuses what else is wrong with them."""
    tags = _list(document, "tags", problems)
    for tag in tags:
        if not isinstance(tag, str) or len(tag.split()) != 1:
            problems.add("tags", f"{EXPECTED}, found {_text(tag)[:TAG_LENGTH]!r}")
    return [word for tag in tags for word in _text(tag).split()]


def _duration(value: Any) -> str:
    return write_seconds(value) if _is_whole(value) and value >= 0 else _text(value)


def _text(value: Any) -> str:
    if value is None or value == {}:
        return ""
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _query(values: Mapping[str, Any]) -> QueryDict:
    query = QueryDict(mutable=True)
    for name, value in values.items():
        query.setlist(name, value if isinstance(value, list) else [value])
    return query
