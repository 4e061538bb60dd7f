"""The submit form: the workload, its pools, and its limits. The fields of a fork, a sweep,
a custom function and a Hugging Face model are in separate modules.

Each group setting has a field built from its schema. Field names are those of
:class:`~diloco.protocol.settings.SettingsError` and :class:`~runs.exceptions.InvalidRun`, so that
an error finds its field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django import forms

from dashboard.forms.custom import CUSTOM, OF_CUSTOM, CustomForm, initial_of_custom
from dashboard.forms.evaluation import EvaluationForm, initial_of_plan
from dashboard.forms.fields import DurationField, setting_field, style_inputs
from dashboard.forms.fork import ForkForm, initial_of_fork
from dashboard.forms.huggingface import (
    HF,
    OF_HF,
    HuggingFaceForm,
    clean_object,
    initial_of_huggingface,
)
from dashboard.forms.pools import ROWS, PoolChoices, PoolForm, initial_of
from dashboard.forms.rows import RowForm
from dashboard.forms.sweep import SweepForm
from dashboard.presentation.formats import exact
from diloco.protocol.settings import GroupSettings, SettingsError, setting_fields
from diloco.protocol.workload import (
    BY_REPLICA,
    BY_UNITS,
    GPT_SIZES,
    SHARDS,
    STDLIB,
    ByteGPTWorkload,
    HuggingFaceWorkload,
    WorkloadDocument,
)
from runs.exceptions import ActionRefused, InvalidRun
from runs.submit.evaluation_plans import MOST_PLANS
from runs.submit.run_draft import PlanDraft, RunDraft
from runs.submit.sweep_space import DERIVED
from runs.submit.tags import parse_tags

DOCUMENT_LENGTH = 64_000
GPT = ByteGPTWorkload.kind
_DATA = ("data_source", "data", "data_coverage")
FIELDS: dict[str, tuple[str, ...]] = {
    GPT: ("size", "eval_bytes", *_DATA),
    HF: (*OF_HF, *_DATA),
    CUSTOM: OF_CUSTOM,
}
"""Fields of each kind of workload."""

MISSING = {
    "uri": "Enter a URI of text files.",
    "shards": "Enter the URI of token shards, e.g. s3://bucket/tokens.",
}
"""Errors of an empty data URI, by source."""

START = {
    "wait": "The replicas that are ready after the wait at the start",
    "quorum": "The minimum quorum, once it is ready",
    "all": "All replicas, once they are ready",
}


class RunForm(ForkForm, SweepForm, CustomForm, HuggingFaceForm):
    name = forms.CharField(label="Name", max_length=80, help_text="Shown in the list of runs.")
    tags = forms.CharField(
        label="Tags",
        required=False,
        max_length=900,
        help_text="Separate tags with spaces. Lists are filtered, and budgets are set, by tag.",
    )
    rendezvous = forms.CharField(
        label="Rendezvous",
        required=False,
        max_length=500,
        help_text="Folder or bucket prefix that all replicas of this run share. "
        "Leave empty for a new folder under the default.",
    )
    store_credential = forms.ChoiceField(
        label="Bucket credential",
        required=False,
        help_text="Access to the rendezvous, for the server and the replicas.",
    )
    start = forms.ChoiceField(
        label="Start with",
        choices=list(START.items()),
        help_text="Replicas that take the first step together. Others join later.",
    )
    start_timeout_s = DurationField(
        label="Start timeout",
        help_text="Stop the run if training hasn't started in this time, e.g. 30m. Leave empty to "
        "wait forever.",
    )
    time_limit_s = DurationField(
        label="Time limit",
        help_text="Stop the run after this time and keep its weights, e.g. 6h. Leave empty for no "
        "limit.",
    )
    budget_usd = forms.FloatField(
        label="Budget",
        required=False,
        min_value=0,
        help_text="Stop the run once this much is spent and keep its weights. Leave empty for no "
        "limit.",
    )
    over_budget = forms.BooleanField(
        label="Launch although the estimate exceeds the budget; stop at the budget",
        required=False,
    )
    max_restarts = forms.IntegerField(
        label="Restarts",
        min_value=0,
        max_value=1000,
        help_text="A replica that fails more often in a row is not restarted.",
    )
    notify = forms.MultipleChoiceField(
        label="Webhooks for alerts",
        required=False,
        widget=forms.CheckboxSelectMultiple,
    )
    trackers = forms.MultipleChoiceField(
        label="Experiment trackers",
        required=False,
        widget=forms.CheckboxSelectMultiple,
    )
    submit_key = forms.CharField(widget=forms.HiddenInput, max_length=64)
    cloned = forms.UUIDField(widget=forms.HiddenInput, required=False)
    document = forms.CharField(
        label="Document",
        required=False,
        max_length=DOCUMENT_LENGTH,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 6}),
        help_text="A run as JSON, TOML or YAML. It replaces the values of the form.",
    )
    workload = forms.ChoiceField(
        label="Workload",
        choices=[(GPT, "Byte-level GPT"), (HF, "Hugging Face"), (CUSTOM, "My own code")],
        widget=forms.RadioSelect,
        required=False,
        initial=GPT,
    )
    size = forms.ChoiceField(
        label="Model", widget=forms.RadioSelect, choices=[(name, name) for name in GPT_SIZES]
    )
    data_source = forms.ChoiceField(
        label="Data",
        choices=[
            ("stdlib", "Python standard library"),
            ("uri", "My own text"),
            ("shards", "Token shards"),
        ],
        widget=forms.RadioSelect,
    )
    data = forms.CharField(  # type: ignore[assignment]
        label="Data URI",
        required=False,
        max_length=500,
        help_text="Text files: a file, folder or glob supported by fsspec, e.g. "
        "file:///data/books or s3://bucket/text/*.txt. Hugging Face models also accept JSON, CSV "
        "or Parquet files, or a data set on the hub. Token shards: the prefix that python -m "
        "diloco.tokenize wrote, e.g. s3://bucket/tokens.",
    )
    data_coverage = forms.ChoiceField(
        label="Coverage of an epoch",
        choices=[
            (BY_REPLICA, "By replica number"),
            (BY_UNITS, "Work units, each sample exactly once"),
        ],
        required=False,
        help_text="By replica number, an absent replica's part is not seen. Work units are claimed "
        "through the bucket; those of replicas that are gone are trained by others.",
    )
    eval_bytes = forms.IntegerField(
        label="Evaluation text",
        min_value=1,
        help_text="Held-out bytes per evaluation.",
    )

    def __init__(
        self,
        data: Any = None,
        files: Any = None,
        *,
        initial: dict[str, Any] | None = None,
        choices: PoolChoices | None = None,
    ) -> None:
        super().__init__(data, files, initial=initial)
        self.choices = choices or PoolChoices.load()
        self._choices("store_credential", self.choices.stores)
        self._choices("notify", self.choices.webhooks)
        self._choices("trackers", self.choices.trackers)
        self.initial.setdefault("notify", [value for value, _ in self.choices.webhooks])
        self.offer_rounds()
        for spec in setting_fields():
            if spec.name not in DERIVED:
                self.fields[spec.name] = setting_field(spec)
        style_inputs(self)
        self.pools = self._pools(data, (initial or {}).get("pools", ()))
        self.evaluations = self._evaluations(data, (initial or {}).get("evaluations", ()))

    @property
    def rows(self) -> list[RowForm]:
        return [*self.pools, *self.evaluations]

    def _choices(self, name: str, choices: Any) -> None:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        field.choices = choices

    def _pools(self, data: Any, initial: Any) -> list[PoolForm]:
        if data is None:
            return [
                PoolForm(index=index, choices=self.choices, initial=row)
                for index, row in enumerate(initial)
            ]
        # A form without rows shows an empty row with its errors.
        return [
            PoolForm(data, index=index, choices=self.choices)
            for index in PoolForm.posted(data, most=ROWS) or [0]
        ]

    def _evaluations(self, data: Any, initial: Any) -> list[EvaluationForm]:
        rows = dict(enumerate(initial))
        if data is not None:
            rows = dict.fromkeys(EvaluationForm.posted(data, most=MOST_PLANS))
        return [
            EvaluationForm(data, index=index, choices=self.choices, initial=row)
            for index, row in rows.items()
        ]

    def empty_pool(self) -> PoolForm:
        """The empty row that the script copies to add a pool."""
        return PoolForm(index="row", choices=self.choices, initial=initial_of(self.choices.first))

    def add_pool(self) -> None:
        """Add a row, for browsers without JavaScript."""
        if len(self.pools) < ROWS:
            first = initial_of(self.choices.first)
            index = _next_index(self.pools)
            self.pools.append(PoolForm(index=index, choices=self.choices, initial=first))

    def remove_pool(self, index: str) -> None:
        if len(self.pools) > 1:
            self.pools = [pool for pool in self.pools if str(pool.index) != index]

    def add_evaluation(self) -> None:
        if len(self.evaluations) < MOST_PLANS:
            index = _next_index(self.evaluations)
            self.evaluations.append(EvaluationForm(index=index, choices=self.choices))

    def remove_evaluation(self, index: str) -> None:
        self.evaluations = [row for row in self.evaluations if str(row.index) != index]

    def clean_tags(self) -> list[str]:
        try:
            return parse_tags(self.cleaned_data["tags"].split())
        except ActionRefused as error:
            raise forms.ValidationError(str(error)) from None

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        cleaned["workload"] = cleaned.get("workload") or GPT
        kind = cleaned["workload"]
        # Ignore input of other kinds: their fields are hidden, and so are their errors.
        for name in {name for names in FIELDS.values() for name in names} - set(FIELDS[kind]):
            self.errors.pop(name, None)
        cleaned["data_coverage"] = cleaned.get("data_coverage") or BY_REPLICA
        if kind == CUSTOM:
            self.clean_custom(cleaned)
        elif cleaned.get("data_source") in MISSING and not cleaned.get("data", "").strip():
            self.add_error("data", MISSING[cleaned["data_source"]])
        if kind == HF:
            clean_object(self, cleaned, "config")
            model, config = cleaned.get("model", "").strip(), cleaned.get("config")
            if "config" not in self.errors and bool(model) == bool(config):
                given = "both" if model else "neither"
                self.add_error(
                    "model", f"expected either a model or a configuration, found {given}"
                )
        return cleaned

    @property
    def kind(self) -> str:
        """The chosen kind; the built-in model if it is missing or unknown."""
        chosen = self["workload"].value()
        return str(chosen) if chosen in FIELDS else GPT

    def forget_errors(self) -> None:
        """Show the input without errors: the form was posted to change it, not to launch."""
        self._errors = forms.utils.ErrorDict()
        self.cleaned_data = {}
        for row in self.rows:
            row.forget_errors()

    def show_errors(self, errors: dict[str, list[str]]) -> None:
        """Attach errors by input name, in the format of :attr:`all_errors`."""
        by_name = {row.add_prefix(name): (row, name) for row in self.rows for name in row.fields}
        for name, messages in errors.items():
            form, field = by_name.get(name, (self, name))
            for message in messages:
                form.add_error(field, message)

    def input_of(self, name: str) -> forms.BoundField | None:
        """The field of an input of the form or of a row; None for errors of the whole form."""
        for row in self.rows:
            if name.startswith(f"{row.prefix}."):
                return row[name.removeprefix(f"{row.prefix}.")]
        return self[name] if name in self.fields else None

    @property
    def all_errors(self) -> dict[str, list[str]]:
        """Errors of the form and its rows by input name."""
        return {
            **{name: [str(e) for e in errors] for name, errors in self.errors.items()},
            **{name: errors for row in self.rows for name, errors in row.named_errors()},
        }

    def draft(self) -> RunDraft | None:
        """The draft of a valid form, or None with errors at the fields."""
        if not all([self.is_valid(), *(row.is_valid() for row in self.rows)]):
            return None
        values = self.cleaned_data
        pools = tuple(pool.draft() for pool in self.pools)
        evaluations = self._plans()
        try:
            settings = self._settings(sum(pool.count for pool in pools))
            workload, archive = self._workload()
        except SettingsError as error:
            self.point_at(error.field, error.message)
            return None
        if evaluations is None:
            return None
        credential = values["store_credential"]
        return RunDraft(
            name=values["name"],
            settings=settings,
            workload=workload,
            archive=archive,
            fork=self.fork(),
            pools=pools,
            rendezvous=values["rendezvous"].strip(),
            store_credential=int(credential) if credential else None,
            time_limit_s=values["time_limit_s"],
            start_timeout_s=values["start_timeout_s"],
            budget_usd=values["budget_usd"] or 0.0,
            max_restarts=values["max_restarts"],
            notify=self._notify(),
            trackers=tuple(sorted(map(int, values["trackers"]))),
            evaluations=evaluations,
            tags=tuple(values["tags"]),
        )

    def _plans(self) -> tuple[PlanDraft, ...] | None:
        """The evaluations; None with errors at their fields."""
        plans = []
        for row in self.evaluations:
            try:
                plans.append(row.draft())
            except InvalidRun as error:
                row.place(error.field, error.message)
        return tuple(plans) if len(plans) == len(self.evaluations) else None

    def _workload(self) -> tuple[WorkloadDocument, bytes]:
        """The workload and its archive. Raises :class:`SettingsError` with the form's field."""
        values = self.cleaned_data
        if values["workload"] == CUSTOM:
            return self.custom()
        data = STDLIB if values["data_source"] == "stdlib" else values["data"].strip()
        is_sharded = values["data_source"] == SHARDS
        if values["workload"] == HF:
            return self.huggingface(data, is_sharded=is_sharded), b""
        gpt = ByteGPTWorkload(
            size=values["size"],
            data=data,
            data_format=SHARDS if is_sharded else "text",
            data_coverage=values["data_coverage"] if is_sharded else BY_REPLICA,
            eval_bytes=values["eval_bytes"],
        )
        return gpt, b""

    def _notify(self) -> tuple[int, ...] | None:
        """Ids of the chosen webhooks; None if all are chosen, which includes future ones."""
        chosen = set(self.cleaned_data["notify"])
        if chosen == {value for value, _ in self.choices.webhooks}:
            return None
        return tuple(sorted(map(int, chosen)))

    def _settings(self, replicas: int) -> GroupSettings:
        values = self.cleaned_data
        chosen = {
            spec.name: values[spec.name] for spec in setting_fields() if spec.name not in DERIVED
        }
        start = {"wait": 0, "quorum": chosen["min_quorum"], "all": replicas}[values["start"]]
        return GroupSettings(**chosen, num_replicas=replicas, start_replicas=start)

    def point_at(self, field: str, message: str) -> None:
        """Attach a domain error to its field; a row's is e.g. ``pools.<index>.<field>``. The field
        of a document, such as ``settings.inner_lr``, is found too."""
        head, _, rest = field.partition(".")
        if head in ("settings", "workload") and rest:
            field = {"kind": "workload"}.get(rest, rest)
        rows: Mapping[str, Sequence[RowForm]] = {
            "pools": self.pools,
            "evaluations": self.evaluations,
        }
        if head in rows and rest:
            index, _, name = rest.partition(".")
            rows[head][int(index)].place(name, message)
        elif field in ("pools", "num_replicas"):
            self.pools[-1].place("count", message)
        else:
            field = {"start_replicas": "start"}.get(field, field)
            self.add_error(field if field in self.fields else None, message)


def _next_index(rows: Sequence[RowForm]) -> int:
    return max((int(row.index) for row in rows), default=-1) + 1


def initial_from(draft: RunDraft) -> dict[str, Any]:
    """Initial values of the form."""
    settings = draft.settings
    starts = {0: "wait", settings.num_replicas: "all"}
    return {
        **{name: exact(value) for name, value in settings.to_dict().items()},
        "name": draft.name,
        **_initial_of_workload(draft.workload),
        **initial_of_huggingface(draft.workload),
        **initial_of_custom(draft.workload),
        **initial_of_fork(draft.fork),
        "pools": [initial_of(pool) for pool in draft.pools],
        "rendezvous": draft.rendezvous,
        "store_credential": "" if draft.store_credential is None else str(draft.store_credential),
        "start": starts.get(settings.start_replicas, "quorum"),
        "start_timeout_s": draft.start_timeout_s,
        "time_limit_s": draft.time_limit_s,
        "budget_usd": f"{draft.budget_usd:g}" if draft.budget_usd else "",
        "max_restarts": draft.max_restarts,
        "trackers": [str(pk) for pk in draft.trackers],
        "evaluations": [initial_of_plan(plan) for plan in draft.evaluations],
        "tags": " ".join(draft.tags),
        **({} if draft.notify is None else {"notify": [str(pk) for pk in draft.notify]}),
    }


def _initial_of_workload(workload: WorkloadDocument) -> dict[str, Any]:
    """The kind, and the fields of the built-in model and the data."""
    gpt = workload if isinstance(workload, ByteGPTWorkload) else ByteGPTWorkload()
    own = workload if isinstance(workload, HuggingFaceWorkload) else gpt
    data, is_sharded = own.data, own.data_format == SHARDS
    return {
        "workload": workload.kind,
        "size": gpt.size,
        "data_source": SHARDS if is_sharded else "stdlib" if data == STDLIB else "uri",
        "data": "" if data == STDLIB else data,
        "data_coverage": own.data_coverage,
        "eval_bytes": gpt.eval_bytes,
    }
