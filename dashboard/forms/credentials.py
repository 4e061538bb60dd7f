"""The form of a credential for pages and API, on top of the one of the administration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from django.forms import BoundField

from dashboard.forms.fields import style_inputs
from runs.admin.credential_form import (
    ALLOWED,
    CLEAR,
    MORE,
    OPTION,
    VARIABLE,
    CredentialForm,
    form_for,
)
from runs.models import Credential


def credential_form(
    kind: Any, credential: Credential | None, data: Mapping[str, Any] | None
) -> CredentialForm:
    """The form for a new credential of a kind, or for a stored one."""
    instance = credential or Credential(kind=kind.kind)
    form = form_for(kind, credential)(data, instance=instance)
    style_inputs(form)
    return form


def form_data(
    *,
    name: str,
    secrets: Mapping[str, str],
    options: Mapping[str, Any],
    allowed: Mapping[str, Any],
    cleared: Iterable[str],
    kind: Any,
) -> dict[str, Any]:
    """The data of the form for values that a program sends."""
    known = {option.name for option in kind.options}
    more = {key: value for key, value in options.items() if key not in known}
    return {
        "name": name,
        **{f"{VARIABLE}{key}": value for key, value in secrets.items()},
        **{f"{CLEAR}{key}": True for key in cleared},
        **{f"{OPTION}{key}": value for key, value in options.items() if key in known},
        MORE: json.dumps(more) if more else "",
        ALLOWED: json.dumps(allowed) if allowed else "",
    }


def field_of(name: str) -> str:
    """The field of the API that a field of the form belongs to."""
    for prefix, place in ((VARIABLE, "secrets"), (CLEAR, "remove"), (OPTION, "options")):
        if name.startswith(prefix):
            return f"{place}.{name.removeprefix(prefix)}"
    return {MORE: "options", ALLOWED: "allowed_pool_options", "__all__": "secrets"}.get(name, name)


def groups(form: CredentialForm) -> list[tuple[str, list[BoundField]]]:
    """The fields by group, as the page shows them."""
    fields = [form[name] for name in form.fields]
    secrets = [f for f in fields if f.name.startswith((VARIABLE, CLEAR))]
    limits = [f for f in fields if f.name == ALLOWED]
    options = [f for f in fields if f.name.startswith(OPTION) or f.name == MORE]
    shown = [("Secrets", secrets), ("Options, not secret", options), ("Restrictions", limits)]
    return [(title, group) for title, group in shown if group]
