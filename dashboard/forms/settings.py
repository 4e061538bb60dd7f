"""Forms of ``/settings``: webhooks, prices, budgets and trackers. The domain checks the values."""

from __future__ import annotations

from typing import Any

from django import forms

from dashboard.forms.fields import StyledForm, style_inputs
from diloco.trackers.opening import Destination, InvalidDestination, TrackerKind
from runs.actions import budgets, prices, trackers, webhooks
from runs.alerts.rules import KINDS
from runs.models import Budget

PRIVATE = {"autocomplete": "new-password", "data-1p-ignore": "", "data-lpignore": "true"}


class WebhookForm(StyledForm):
    name = forms.CharField(label="Name", max_length=webhooks.NAME_LENGTH)
    url = forms.URLField(
        label="Address",
        max_length=webhooks.URL_LENGTH,
        assume_scheme="https",
        help_text="An http or https address that answers with status 2xx.",
        error_messages={"invalid": "Enter an address such as https://example.org/hook"},
    )
    kinds = forms.MultipleChoiceField(
        label="Notify about",
        choices=list(KINDS.items()),
        widget=forms.CheckboxSelectMultiple,
        initial=webhooks.USUAL,
        error_messages={"required": "Select at least one kind of alert."},
    )
    enabled = forms.BooleanField(label="Enabled", required=False, initial=True)
    secret = forms.CharField(
        label="Signing secret",
        required=False,
        max_length=webhooks.SECRET_LENGTH,
        widget=forms.PasswordInput(attrs=PRIVATE),
        help_text="whsec_ and 24 to 64 bytes in base64.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["kinds"].widget.attrs.pop("class", None)
        kept = "keep the current one" if self.initial else "generate one, which is shown once"
        self.fields["secret"].help_text += f" Leave empty to {kept}."


class BudgetForm(StyledForm):
    scope = forms.ChoiceField(label="For", choices=[("owner", "Owner"), ("tag", "Tag")])
    name = forms.CharField(
        label="Name",
        max_length=150,
        help_text="A user name, or a tag of runs. Both are suggested.",
        widget=forms.TextInput(attrs={"list": "budget-names", "autocomplete": "off"}),
    )
    amount_usd = forms.FloatField(
        label="Amount", min_value=0, max_value=budgets.MOST_USD, help_text="In US dollars."
    )
    period = forms.ChoiceField(
        label="Each",
        choices=list(Budget.Period.choices),
        initial=Budget.Period.MONTH,
        help_text="In UTC; weeks begin on Monday.",
    )
    warn_percent = forms.FloatField(
        label="Warn at",
        min_value=1,
        max_value=100,
        initial=round(100 * budgets.DEFAULT_WARN),
        help_text="An alert and a banner on the runs; launches stop at 100%.",
    )

    def values(self) -> dict[str, Any]:
        """Arguments of :func:`runs.actions.budgets.save_budget`."""
        values = dict(self.cleaned_data)
        return {"warn_at": values.pop("warn_percent") / 100, **values}


class HardwarePriceForm(StyledForm):
    price_usd_h = forms.FloatField(
        label="On demand", required=False, min_value=0, max_value=prices.MOST_USD
    )
    spot_price_usd_h = forms.FloatField(
        label="Spot", required=False, min_value=0, max_value=prices.MOST_USD
    )


class TrafficPriceForm(StyledForm):
    upload_usd_gb = forms.FloatField(
        label="Upload per GB",
        min_value=0,
        max_value=prices.MOST_USD,
        help_text="Replica to bucket.",
    )
    download_usd_gb = forms.FloatField(
        label="Download per GB",
        min_value=0,
        max_value=prices.MOST_USD,
        help_text="Bucket to replica.",
    )
    requests_usd_million = forms.FloatField(
        label="Per million requests", min_value=0, max_value=prices.MOST_USD
    )


class TrackerForm(StyledForm):
    """A tracker of one kind. An empty secret keeps the stored one."""

    name = forms.CharField(label="Name", max_length=trackers.NAME_LENGTH)
    server = forms.CharField(required=False, max_length=500)
    project = forms.CharField(required=False, max_length=200)
    enabled = forms.BooleanField(label="Enabled", required=False, initial=True)

    def __init__(self, kind: TrackerKind, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind = kind
        for name, label in (("server", kind.server), ("project", kind.project)):
            if label:
                self.fields[name].label = label
            else:
                del self.fields[name]
        if kind.default_server:
            self.fields["server"].help_text = f"Leave empty for {kind.default_server}."
        for name in kind.secrets:
            self.fields[name] = forms.CharField(
                label=name,
                required=False,
                max_length=1000,
                widget=forms.PasswordInput(attrs=PRIVATE),
                help_text="Leave empty to keep the current one, for the same address only."
                if self.initial
                else "Stored encrypted, and never shown again.",
            )
        style_inputs(self)

    def clean(self) -> dict[str, Any]:
        values = super().clean() or {}
        try:
            self.destination()
        except InvalidDestination as error:
            if error.field not in self.errors:
                self.add_error(error.field, error.message)
        return values

    @property
    def secret_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.kind.secrets]

    def destination(self) -> Destination:
        """Raises :class:`InvalidDestination` unless the form is valid."""
        values = self.cleaned_data
        return Destination(
            kind=self.kind.name,
            server=values.get("server", "").strip(),
            project=values.get("project", "").strip(),
        )

    def secrets(self) -> dict[str, str]:
        return {name: self.cleaned_data[name] for name in self.kind.secrets}
