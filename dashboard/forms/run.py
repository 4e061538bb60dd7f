"""The submit form: what is trained, on which pools, within which limits.

Group settings get one field each, made from their schema. Field names are those that
:class:`~diloco.protocol.settings.SettingsError` and :class:`~runs.exceptions.InvalidRun` use, so
that an error finds its field.
"""

from __future__ import annotations

from typing import Any

from django import forms

from dashboard.forms.fields import DurationField, dress, setting_field
from dashboard.forms.fork import ForkForm, initial_of_fork
from dashboard.forms.pools import ROWS, PoolChoices, PoolForm, initial_of, posted_rows
from dashboard.forms.workload import WorkloadForm, initial_of_workload
from dashboard.presentation.formats import exact
from diloco.protocol.settings import GroupSettings, SettingsError, setting_fields
from runs.submit.run_draft import RunDraft

DERIVED = frozenset({"num_replicas", "start_replicas"})
"""Settings without a field of their own: the pools, and the start policy, say them."""

START = {
    "wait": "Whoever came within the wait at the start",
    "quorum": "As soon as the minimum quorum is ready",
    "all": "Only when all replicas are ready",
}


class RunForm(ForkForm, WorkloadForm):
    name = forms.CharField(
        label="Name", max_length=80, help_text="What you will look for in the list."
    )
    rendezvous = forms.CharField(
        label="Rendezvous",
        required=False,
        max_length=500,
        help_text="The folder or bucket prefix all replicas share, for this run alone. "
        "Left empty, the run gets its own folder under the default.",
    )
    store_credential = forms.ChoiceField(
        label="Credential of the bucket",
        required=False,
        help_text="Opens the rendezvous, for us and for the replicas.",
    )
    start = forms.ChoiceField(
        label="First step", choices=list(START.items()), help_text="Who must be there and ready."
    )
    start_timeout_s = DurationField(
        label="Give up if not started",
        help_text="Without a first step by then the run is stopped. Such as 30m; empty: never.",
    )
    time_limit_s = DurationField(
        label="Time limit",
        help_text="Then the run is stopped and its weights are kept. Such as 6h; empty: none.",
    )
    budget_usd = forms.FloatField(
        label="Budget",
        required=False,
        min_value=0,
        help_text="When so much has been spent the run is stopped and its weights are kept. "
        "Empty or 0: none.",
    )
    over_budget = forms.BooleanField(
        label="The estimate is above it: launch anyway, and stop there",
        required=False,
    )
    max_restarts = forms.IntegerField(
        label="Restarts",
        min_value=0,
        max_value=1000,
        help_text="How often in a row a replica that failed is launched again.",
    )
    notify = forms.MultipleChoiceField(
        label="Who is told of its alerts",
        required=False,
        widget=forms.CheckboxSelectMultiple,
    )
    submit_key = forms.CharField(widget=forms.HiddenInput, max_length=64)

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
        self.initial.setdefault("notify", [value for value, _ in self.choices.webhooks])
        self.offer_rounds()
        for spec in setting_fields():
            if spec.name not in DERIVED:
                self.fields[spec.name] = setting_field(spec)
        dress(self)
        self.pools = self._pools(data, (initial or {}).get("pools", ()))

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
        # A form without any row shows an empty one, with what is missing in it.
        return [
            PoolForm(data, index=index, choices=self.choices) for index in posted_rows(data) or [0]
        ]

    def empty_pool(self) -> PoolForm:
        """The row a browser copies to make another."""
        return PoolForm(index="row", choices=self.choices, initial=initial_of(self.choices.first))

    def add_pool(self) -> None:
        """One more row, for a browser without JavaScript."""
        index = max((int(pool.index) for pool in self.pools), default=-1) + 1
        if len(self.pools) < ROWS:
            self.pools.append(
                PoolForm(index=index, choices=self.choices, initial=initial_of(self.choices.first))
            )

    def remove_pool(self, index: str) -> None:
        if len(self.pools) > 1:
            self.pools = [pool for pool in self.pools if str(pool.index) != index]

    def forget_errors(self) -> None:
        """Show what was typed as it is: the form was sent to be changed, not to be launched."""
        self._errors = forms.utils.ErrorDict()
        self.cleaned_data = {}
        for pool in self.pools:
            pool.forget_errors()

    def show_errors(self, errors: dict[str, list[str]]) -> None:
        """Errors by the name of the input, as :attr:`all_errors` has them."""
        by_name = {
            pool.add_prefix(name): (pool, name) for pool in self.pools for name in pool.fields
        }
        for name, messages in errors.items():
            form, field = by_name.get(name, (self, name))
            for message in messages:
                form.add_error(field, message)

    def input_of(self, name: str) -> forms.BoundField | None:
        """The field of that input, of the form or of one of its rows; None for the form's own."""
        for pool in self.pools:
            if name.startswith(f"{pool.prefix}."):
                return pool[name.removeprefix(f"{pool.prefix}.")]
        return self[name] if name in self.fields else None

    @property
    def all_errors(self) -> dict[str, list[str]]:
        """By the name of the input, those of the rows included."""
        return {
            **{name: [str(e) for e in errors] for name, errors in self.errors.items()},
            **{name: errors for pool in self.pools for name, errors in pool.named_errors()},
        }

    def draft(self) -> RunDraft | None:
        """What was asked for, or None with errors at their fields."""
        if not all([self.is_valid(), *(pool.is_valid() for pool in self.pools)]):
            return None
        values = self.cleaned_data
        pools = tuple(pool.draft() for pool in self.pools)
        try:
            settings = self._settings(sum(pool.count for pool in pools))
            workload, archive = self.chosen()
        except SettingsError as error:
            self.point_at(error.field, error.message)
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
        )

    def _notify(self) -> tuple[int, ...] | None:
        """Ids; None for all there are, those of tomorrow included."""
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
        """Put a domain error at the field it belongs to; a pool's is ``pools.<place>.<field>``."""
        head, _, rest = field.partition(".")
        if head == "pools" and rest:
            place, _, name = rest.partition(".")
            self.pools[int(place)].place(name, message)
        elif field in ("pools", "num_replicas"):
            self.pools[-1].place("count", message)
        else:
            field = {"start_replicas": "start"}.get(field, field)
            self.add_error(field if field in self.fields else None, message)


def initial_from(draft: RunDraft) -> dict[str, Any]:
    """A draft as the form shows it."""
    settings = draft.settings
    starts = {0: "wait", settings.num_replicas: "all"}
    return {
        **{name: exact(value) for name, value in settings.to_dict().items()},
        "name": draft.name,
        **initial_of_workload(draft.workload),
        **initial_of_fork(draft.fork),
        "pools": [initial_of(pool) for pool in draft.pools],
        "rendezvous": draft.rendezvous,
        "store_credential": "" if draft.store_credential is None else str(draft.store_credential),
        "start": starts.get(settings.start_replicas, "quorum"),
        "start_timeout_s": draft.start_timeout_s,
        "time_limit_s": draft.time_limit_s,
        "budget_usd": f"{draft.budget_usd:g}" if draft.budget_usd else "",
        "max_restarts": draft.max_restarts,
        **({} if draft.notify is None else {"notify": [str(pk) for pk in draft.notify]}),
    }
