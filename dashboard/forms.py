"""Forms. They parse and point at the wrong field; what is valid is decided where it is used:
:class:`diloco.rendezvous.settings.GroupSettings` and :mod:`runs.services`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm, UserCreationForm
from django.contrib.auth.models import Group, User

from dashboard.formats import exact
from diloco.rendezvous.settings import GroupSettings, SettingsError, SettingSpec, setting_fields
from diloco.rendezvous.workload import GPT_SIZES, STDLIB, ByteGPTWorkload
from executors.registry import BACKENDS
from runs.presets import PoolDraft, RunDraft

if TYPE_CHECKING:
    _UserCreation = UserCreationForm[User]
else:
    _UserCreation = UserCreationForm


class SignInForm(AuthenticationForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs["class"] = "input"


class FirstAdministratorForm(_UserCreation):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs["class"] = "input"
        self.fields["username"].widget.attrs["autofocus"] = True
        self.fields["username"].help_text = ""
        self.fields["password1"].help_text = "At least 8 characters, and not a common one."
        self.fields["password2"].help_text = ""
        self.fields["password2"].label = "Password again"

    class Meta:
        model = User
        fields = ("username",)

    def save_if_first(self) -> User | None:
        """The new administrator, or None if somebody was faster. Call inside ``atomic``.

        The row of the admin group is the lock, so that of two people only one becomes the first.
        """
        group, _ = Group.objects.get_or_create(name="admin")
        Group.objects.select_for_update().get(pk=group.pk)
        if User.objects.exists():
            return None
        user = self.save(commit=False)
        user.is_staff = user.is_superuser = True
        user.save()
        user.groups.add(group)
        return user


class RunForm(forms.Form):
    """The submit form. Group settings get one field each, made from their schema.

    Field names are those that :class:`~diloco.rendezvous.settings.SettingsError` and
    :class:`~runs.exceptions.InvalidRun` use, so that an error finds its field.
    """

    name = forms.CharField(
        label="Name", max_length=80, help_text="What you will look for in the list."
    )
    size = forms.ChoiceField(label="Model", widget=forms.RadioSelect)
    data_source = forms.ChoiceField(
        label="Data",
        choices=[
            ("stdlib", "Python standard library"),
            ("uri", "My own text"),
        ],
        widget=forms.RadioSelect,
    )
    data = forms.CharField(  # type: ignore[assignment]
        label="Data URI",
        required=False,
        max_length=500,
        help_text="Text files: a file, folder or glob that fsspec opens, such as "
        "file:///data/books or s3://bucket/text/*.txt.",
    )
    eval_bytes = forms.IntegerField(
        label="Evaluation text",
        min_value=1,
        help_text="How much held-out text one evaluation reads.",
    )
    pool_backend = forms.ChoiceField(label="Backend")
    pool_count = forms.IntegerField(
        label="Replicas", min_value=1, max_value=1024, help_text="One process each."
    )
    rendezvous = forms.CharField(
        label="Rendezvous",
        required=False,
        max_length=500,
        help_text="The folder or bucket prefix all replicas share, for this run alone. "
        "Left empty, the run gets its own folder under the default.",
    )
    time_limit_min = forms.FloatField(
        label="Time limit",
        min_value=0,
        required=False,
        help_text="Then the run is stopped and its weights are kept. 0 means no limit.",
    )
    submit_key = forms.CharField(widget=forms.HiddenInput, max_length=64)

    def __init__(self, data: Any = None, *, initial: dict[str, Any] | None = None) -> None:
        super().__init__(data, initial=initial)
        self._choices("size", [(name, name) for name in GPT_SIZES])
        self._choices("pool_backend", list(BACKENDS.items()))
        for spec in setting_fields():
            if spec.name != "num_replicas":  # the pools say how many
                self.fields[spec.name] = setting_field(spec)
        for name, field in self.fields.items():
            if not isinstance(field.widget, forms.RadioSelect | forms.HiddenInput):
                field.widget.attrs.update({"class": "input", "autocomplete": "off"})
            if name in ("data", "rendezvous"):
                field.widget.attrs["spellcheck"] = "false"

    def _choices(self, name: str, choices: list[tuple[str, str]]) -> None:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        field.choices = choices

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        if cleaned.get("data_source") == "uri" and not cleaned.get("data", "").strip():
            self.add_error("data", "expected a URI of text files, found none")
        return cleaned

    def draft(self) -> RunDraft | None:
        """What was asked for, or None with errors at their fields."""
        if not self.is_valid():
            return None
        values = self.cleaned_data
        try:
            chosen = {
                spec.name: values[spec.name]
                for spec in setting_fields()
                if spec.name != "num_replicas"
            }
            settings = GroupSettings(num_replicas=values["pool_count"], **chosen)
            workload = ByteGPTWorkload(
                size=values["size"],
                data=STDLIB if values["data_source"] == "stdlib" else values["data"].strip(),
                eval_bytes=values["eval_bytes"],
            )
        except SettingsError as error:
            self.point_at(error.field, error.message)
            return None
        return RunDraft(
            name=values["name"],
            settings=settings,
            workload=workload,
            pools=(
                PoolDraft(
                    backend=values["pool_backend"], hardware="cpu", count=values["pool_count"]
                ),
            ),
            rendezvous=values["rendezvous"].strip(),
            time_limit_s=round((values["time_limit_min"] or 0) * 60),
        )

    def point_at(self, field: str, message: str) -> None:
        """Put a domain error at the field it belongs to."""
        place = {
            "num_replicas": "pool_count", "pools": "pool_count", "time_limit_s": "time_limit_min",
        }.get(field, field)  # fmt: skip
        self.add_error(place if place in self.fields else None, message)


def setting_field(spec: SettingSpec) -> forms.Field:
    """A form field for one group setting. Bounds are left to the schema, which words the error."""
    if spec.kind == "choice":
        return forms.ChoiceField(
            label=spec.label, help_text=spec.help, choices=[(c, c) for c in spec.choices]
        )
    kind = forms.IntegerField if spec.kind == "int" else forms.FloatField
    return kind(label=spec.label, help_text=spec.help, validators=[bounds(spec)])


def bounds(spec: SettingSpec) -> Any:
    def check(value: Any) -> None:
        try:
            spec.check(value)
        except SettingsError as error:
            raise forms.ValidationError(error.message) from None

    return check


def initial_from(draft: RunDraft) -> dict[str, Any]:
    """A draft as the form shows it."""
    return {
        **{name: exact(value) for name, value in draft.settings.to_dict().items()},
        "name": draft.name,
        "size": draft.workload.size,
        "data_source": "stdlib" if draft.workload.data == STDLIB else "uri",
        "data": "" if draft.workload.data == STDLIB else draft.workload.data,
        "eval_bytes": draft.workload.eval_bytes,
        "pool_backend": draft.pools[0].backend,
        "pool_count": sum(pool.count for pool in draft.pools),
        "rendezvous": draft.rendezvous,
        "time_limit_min": f"{draft.time_limit_s / 60:g}",
    }
