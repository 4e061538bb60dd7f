"""The write-only form of a credential.

Neither stored values nor refused input are ever shown; an empty field keeps the stored value. The
fields depend on the kind (:mod:`runs.credentials.kinds`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib.auth.models import User

from diloco.protocol.parsing import check_storable, parse_json
from diloco.store.credentials import family_of
from executors.backend import Variable
from runs import redaction
from runs.actions.credentials import known_values, save_credential
from runs.credentials.kinds import ROLE_ARN, SCHEME, TEST_URI, Kind, Option, is_secret
from runs.credentials.restrictions import read_patterns
from runs.models import Credential

if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Credential]
else:
    _ModelForm = forms.ModelForm

VARIABLE, CLEAR, OPTION, MORE = "variable_", "clear_", "option_", "more_options"
ALLOWED = "allowed_pool_options"

_PRIVATE = {
    "class": "vTextField",
    "autocomplete": "off",
    "autocapitalize": "off",
    "spellcheck": "false",
    # Attributes that disable password managers.
    "data-1p-ignore": "",
    "data-lpignore": "true",
}


class _WriteOnly(forms.Textarea):
    def format_value(self, value: Any) -> None:
        return None


class _WriteOnlyLine(forms.TextInput):
    def format_value(self, value: Any) -> None:
        return None


class CredentialForm(_ModelForm):
    """Created for one kind by :func:`form_for`."""

    kind: Kind
    stored: frozenset[str]
    """Names of stored variables that can be decrypted."""

    class Meta:
        model = Credential
        fields = ("name",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.stored & {variable.name for variable in self.kind.variables}:
            field = self.fields[f"{VARIABLE}{name}"]
            field.widget.attrs["placeholder"] = "Stored. Enter a value to replace it."
        for name, value in self.instance.options.items():
            if f"{OPTION}{name}" in self.fields:
                self.initial[f"{OPTION}{name}"] = value
        more = {n: v for n, v in self.instance.options.items() if n not in self._known_options()}
        if MORE in self.fields and more:
            self.initial[MORE] = json.dumps(more, indent=2)
        if ALLOWED in self.fields and self.instance.allowed_pool_options:
            self.initial[ALLOWED] = json.dumps(self.instance.allowed_pool_options, indent=2)

    def _known_options(self) -> set[str]:
        return {SCHEME, *(option.name for option in self.kind.options)}

    @property
    def typed(self) -> dict[str, str]:
        """Variables with a new value. Valid after validation."""
        return dict(self._given(VARIABLE))

    @property
    def cleared(self) -> list[str]:
        return [name for name, _ in self._given(CLEAR)]

    @property
    def options(self) -> dict[str, Any]:
        scheme = {SCHEME: self.kind.scheme} if self.kind.scheme else {}
        return {**(self.cleaned_data.get(MORE) or {}), **scheme, **dict(self._given(OPTION))}

    def _given(self, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in self.cleaned_data.items():
            if name.startswith(prefix) and value not in ("", None, False):
                yield name.removeprefix(prefix), value

    def store(self, *, actor: User) -> Credential:
        """Save the credential of a valid form."""
        credential: Credential = self.save(commit=False)
        credential.kind, credential.options = self.kind.kind, self.options
        credential.allowed_pool_options = self.cleaned_data.get(ALLOWED) or {}
        save_credential(credential, typed=self.typed, cleared=self.cleared, actor=actor)
        return credential

    def clean(self) -> dict[str, Any]:
        super().clean()
        for variable in self.kind.variables:
            self._read(variable)
        if not self.errors:
            self._require()
        if TEST_URI in self._known_options():
            self._check_uri()
        return self.cleaned_data

    def _read(self, variable: Variable) -> None:
        field = f"{VARIABLE}{variable.name}"
        text = self.cleaned_data.get(field) or ""
        if not text:
            return
        if not variable.long and not text.isprintable():
            self.add_error(field, "expected printable characters, found others")
        elif variable.name.startswith("AWS_ENDPOINT_URL") and "://" not in text:
            self.add_error(field, "expected an address with http:// or https://")
        elif variable.read is not None:
            try:
                self.cleaned_data[field] = variable.read(text)
            except ValueError as error:
                self.add_error(field, str(error))

    def _require(self) -> None:
        """Require variables that are neither stored nor entered."""
        available = (self.stored - set(self.cleared)) | set(self.typed)
        if self.kind.unless and self.options.get(self.kind.unless) and not available:
            return
        for variable in self.kind.variables:
            if variable.required and variable.name not in available:
                self.add_error(f"{VARIABLE}{variable.name}", "This field is required.")
        if self.kind.one_of and not available & set(self.kind.one_of):
            self.add_error(None, f"expected {' or '.join(self.kind.one_of)}, found neither")

    def _check_uri(self) -> None:
        uri = self.cleaned_data.get(f"{OPTION}{TEST_URI}") or ""
        if uri and family_of(uri) != self.kind.scheme:
            self.add_error(f"{OPTION}{TEST_URI}", f"expected {self.kind.scheme}://…, found {uri}")
        role = str(self.cleaned_data.get(f"{OPTION}{ROLE_ARN}") or "")
        if role and not role.startswith("arn:"):
            self.add_error(f"{OPTION}{ROLE_ARN}", f"expected arn:aws:iam::…:role/…, found {role}")

    def clean_allowed_pool_options(self) -> dict[str, list[str]]:
        try:
            return read_patterns(_parsed(self.cleaned_data[ALLOWED], ALLOWED))
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None

    def clean_more_options(self) -> dict[str, Any]:
        try:
            options = _parsed(self.cleaned_data[MORE], MORE)
        except ValueError as error:
            raise forms.ValidationError(f"expected JSON, found {error}") from None
        if not isinstance(options, dict):
            raise forms.ValidationError('expected a JSON object: {"name": value}')
        duplicates = sorted(set(options) & self._known_options())
        if duplicates:
            raise forms.ValidationError(f"{', '.join(duplicates)}: use the separate field")
        return options


def _parsed(text: str, name: str) -> Any:
    """Parse JSON that a column can store. Raises ``ValueError``."""
    value = parse_json(text.strip() or "{}")
    check_storable(value, name)
    return value


def remember_secrets(values: Mapping[str, Any]) -> None:
    """Redact the secrets among the values of a form from every log and error page from now on."""
    redaction.remember(
        value
        for name, value in values.items()
        if name.startswith(VARIABLE) and is_secret(name.removeprefix(VARIABLE))
        if isinstance(value, str)
    )


def form_for(kind: Kind, credential: Credential | None = None) -> type[CredentialForm]:
    """The form class for a new credential of ``kind``, or for a stored one."""
    stored = frozenset(known_values(credential) if credential else ())
    fields: dict[str, forms.Field] = {}
    for variable in kind.variables:
        fields[f"{VARIABLE}{variable.name}"] = _variable_field(variable)
        if variable.name in stored and not variable.required:
            fields[f"{CLEAR}{variable.name}"] = forms.BooleanField(
                required=False, label=f"Remove {variable.name}"
            )
    for option in kind.options:
        fields[f"{OPTION}{option.name}"] = _option_field(option)
    if kind.backend:
        fields[MORE] = forms.CharField(
            required=False,
            label="More options",
            widget=forms.Textarea(attrs={"rows": 4}),
            help_text=f"JSON object with options of docs/backends/{kind.backend}.md",
        )
        fields[ALLOWED] = forms.CharField(
            required=False,
            label="Options that pools can set",
            widget=forms.Textarea(attrs={"rows": 4}),
            help_text="JSON object of option and values, both with wildcards, e.g. "
            '{"service_account": ["team-*"], "pod.tolerations.*": ["*"]}. Leave empty to allow no '
            "option that reaches into the cluster or account (docs/security.md).",
        )
    return type("KindForm", (CredentialForm,), {"kind": kind, "stored": stored, **fields})


def _variable_field(variable: Variable) -> forms.Field:
    widget: forms.Widget
    if variable.long:
        widget = _WriteOnly(attrs={**_PRIVATE, "rows": 6})
    elif variable.secret:
        widget = forms.PasswordInput(attrs={**_PRIVATE, "autocomplete": "new-password"})
    else:
        widget = _WriteOnlyLine(attrs=_PRIVATE)
    return forms.CharField(
        required=False,
        label=f"{variable.label} ({variable.name})",
        help_text=variable.help,
        max_length=100_000 if variable.long else 5000,
        widget=widget,
    )


def _option_field(option: Option) -> forms.Field:
    common: dict[str, Any] = {
        "required": False,
        "label": option.label,
        "help_text": option.help,
    }
    if option.type is bool:
        return forms.BooleanField(**common)
    if option.type is int:
        return forms.IntegerField(min_value=1, **common)
    return forms.CharField(
        max_length=500, widget=forms.TextInput(attrs={"class": "vTextField"}), **common
    )
