"""The form of one pool: replicas on one backend and hardware. Used as a row of the submit form, and
to add a pool to a run.

The value of hardware is ``backend:name``, because names are only unique within a backend. The
script hides other backends' hardware; without JavaScript the options are grouped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from django import forms
from django.contrib.auth.models import User

from dashboard.forms.fields import DataSelect, DurationField, style_inputs
from dashboard.forms.huggingface import clean_object
from dashboard.forms.rows import RowForm
from dashboard.presentation import formats
from executors.base import Capabilities
from executors.catalogue import Hardware
from executors.options import Option, is_fixed
from executors.registry import BACKENDS, DESCRIPTIONS, ON_SERVER
from runs.backends.executors import capabilities_of, catalogue, usable_backends
from runs.local_access import can_use_local
from runs.queries import named
from runs.submit.run_draft import PoolDraft

ROWS = 32
"""Maximum number of pools in a form."""

Choices = list[tuple[str, str | list[tuple[str, str]]]]


@dataclass(frozen=True, kw_only=True)
class PoolChoices:
    """Options of all pool rows, loaded once. ``option_data`` has the data attributes by value."""

    backends: Choices
    hardware: Choices
    credentials: Choices
    stores: Choices
    webhooks: list[tuple[str, str]]
    trackers: list[tuple[str, str]]
    option_data: Mapping[str, Mapping[str, Any]]
    first: PoolDraft
    """The initial pool of a new row: a backend that the user can use, if there is one."""

    @classmethod
    def load(cls, user: User | None = None) -> PoolChoices:
        """Load the options with three queries. With ``user``, backends that they cannot use are
        marked."""
        backends = usable_backends()
        by_kind: dict[str, list[tuple[str, str]]] = {}
        option_data: dict[str, dict[str, Any]] = {}
        for credential in named.credentials():
            pk, kind = str(credential.pk), credential.kind
            by_kind.setdefault(kind, []).append((pk, credential.name))
            option_data[pk] = {"backend": kind}
            if kind in backends:
                option_data[pk] |= _capability_data(capabilities_of(kind, credential))
        hardware: Choices = []
        for backend, label in backends.items():
            machines = catalogue().of(backend)
            option_data[backend] = _capability_data(capabilities_of(backend))
            option_data |= {f"{backend}:{h.name}": _price_data(h) for h in machines}
            hardware.append((label, [(f"{backend}:{h.name}", hardware_text(h)) for h in machines]))
        return cls(
            backends=[
                (backend, _permitted(backend, label, user)) for backend, label in backends.items()
            ],
            hardware=hardware,
            credentials=[
                ("", "Server environment"),
                *((backends[kind], of) for kind, of in by_kind.items() if kind in backends),
            ],
            stores=[("", "Server environment"), *by_kind.get("store", [])],
            webhooks=[(str(pk), name) for pk, name in named.webhooks(enabled=True).items()],
            trackers=[(str(pk), name) for pk, name in named.trackers().items()],
            option_data=option_data,
            first=_first_pool(user, backends),
        )


def _permitted(backend: str, label: str, user: User | None) -> str:
    if backend not in ON_SERVER or user is None or can_use_local(user):
        return label
    return f"{label} (not permitted: ask an administrator)"


def _capability_data(can: Capabilities) -> dict[str, Any]:
    """Data attributes of a backend, or of a credential, whose capabilities can differ."""
    return {
        "remote": can.remote,
        "regions": "|".join(can.regions),
        "spot": can.spot,
        "images": can.images,
        "longest": formats.duration(can.max_lifetime_s) if can.max_lifetime_s else "",
    }


def _price_data(hardware: Hardware) -> dict[str, Any]:
    return {
        "backend": hardware.backend,
        "price": None if hardware.price_usd_h is None else f"{hardware.price_usd_h:g}",
        "spot": None if hardware.spot_price_usd_h is None else f"{hardware.spot_price_usd_h:g}",
    }


def hardware_text(hardware: Hardware) -> str:
    """``4x L4 · 96 GiB GPU · 48 CPUs · 186 GiB · $3.80/h``."""
    parts = [hardware.label]
    if hardware.gpu_memory_gib is not None:
        parts.append(f"{hardware.gpu_memory_gib:g} GiB GPU")
    has_all = re.findall(r"[\d.]+ (?:v?CPU|core|GiB)", hardware.label)  # some labels are complete
    if hardware.cpus is not None and not has_all:
        parts.append(f"{hardware.cpus:g} CPU{'' if hardware.cpus == 1 else 's'}")
    if hardware.memory_gib is not None and not has_all:
        parts.append(f"{hardware.memory_gib:g} GiB")
    if hardware.price_usd_h is None:
        parts.append("price unknown")
    elif hardware.price_usd_h:
        parts.append(f"{formats.money(hardware.price_usd_h)}/h")
    return " · ".join(parts)


def option_help() -> list[tuple[str, list[Option]]]:
    """Label of each backend, and the options that a pool can set on it."""
    return [
        (label, [option for option in declared.values() if not is_fixed(option)])
        for name, label in usable_backends().items()
        if (declared := DESCRIPTIONS[name].declared_options)
    ]


class PoolForm(RowForm):
    """Field names are those of :class:`~runs.submit.run_draft.PoolDraft`."""

    part = "pools"
    fallback = "backend"

    backend = forms.ChoiceField(label="Backend")
    hardware = forms.ChoiceField(label="Hardware")
    count = forms.IntegerField(label="Replicas", min_value=1, max_value=1024)
    credential = forms.ChoiceField(label="Credential", required=False)
    region = forms.CharField(
        label="Region", required=False, max_length=64, help_text="Leave empty for any region."
    )
    timeout_s = DurationField(
        label="Job time limit",
        help_text="E.g. 1d 6h. The replica then continues in a new job. "
        "Leave empty for the longest allowed.",
    )
    image = forms.CharField(
        label="Image",
        required=False,
        max_length=300,
        help_text="Leave empty for the backend's default.",
    )
    price_usd_h = forms.FloatField(
        label="Price",
        required=False,
        min_value=0,
        help_text="Per replica. Not in the price list. Leave empty if unknown.",
    )
    max_price_usd_h = forms.FloatField(
        label="Max price",
        required=False,
        min_value=0,
        help_text="Per replica. More expensive machines won't be launched. Leave empty for no "
        "limit.",
    )
    options = forms.CharField(
        label="Options",
        required=False,
        max_length=20_000,
        help_text="Backend-specific options as a JSON object.",
    )
    spot = forms.BooleanField(
        label="Spot",
        required=False,
        help_text="Cheaper, but the provider can reclaim the machine at any time.",
    )

    def __init__(
        self,
        data: Any = None,
        *,
        index: int | str,
        choices: PoolChoices,
        initial: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(data, index=index, initial=initial)
        for name, options in (
            ("backend", choices.backends),
            ("hardware", choices.hardware),
            ("credential", choices.credentials),
        ):
            field = self.fields[name]
            assert isinstance(field, forms.ChoiceField)
            field.widget = DataSelect(choices.option_data)
            field.choices = options
        style_inputs(self)

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        clean_object(self, cleaned, "options")
        if "options" not in self.errors and not isinstance(cleaned["options"], dict):
            self.add_error("options", f"expected a JSON object, found {cleaned['options']!r}")
        backend = cleaned.get("backend", "")
        if not backend:
            return cleaned
        owner, _, hardware = cleaned.get("hardware", "").partition(":")
        if owner and owner != backend:
            self.add_error(
                "hardware",
                f"expected hardware of {BACKENDS[backend]}, found {BACKENDS[owner]}'s {hardware}",
            )
        cleaned["hardware"] = hardware
        credential = cleaned.get("credential", "")
        kind = self.fields["credential"].widget.data.get(credential, {}).get("backend", backend)
        if kind != backend:
            self.add_error(
                "credential",
                f"expected a credential for {BACKENDS[backend]}, found one for {BACKENDS[kind]}",
            )
        return cleaned

    def draft(self) -> PoolDraft:
        """The pool of a valid row."""
        values = self.cleaned_data
        return PoolDraft(
            **{
                field.name: values[field.name]
                for field in fields(PoolDraft)
                if field.name in values and field.name != "credential"
            },
            credential=int(values["credential"]) if values["credential"] else None,
        )


def _first_pool(user: User | None, backends: Iterable[str]) -> PoolDraft:
    if user is None or can_use_local(user):
        return PoolDraft()
    drafts = (
        PoolDraft(backend=backend, hardware=hardware.name)
        for backend in backends
        if backend not in ON_SERVER
        for hardware in catalogue().of(backend)
    )
    return next(drafts, PoolDraft())


def initial_of(pool: PoolDraft) -> dict[str, Any]:
    """Initial values of a row."""
    return {
        **{field.name: getattr(pool, field.name) for field in fields(PoolDraft)},
        "hardware": f"{pool.backend}:{pool.hardware}",
        "options": json.dumps(dict(pool.options)) if pool.options else "",
        "credential": "" if pool.credential is None else str(pool.credential),
    }
