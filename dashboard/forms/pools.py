"""A row of the submit form: replicas on one backend and hardware. The run page adds pools with it.

Names are ``pools.<index>.<field>``, as :class:`~runs.exceptions.InvalidRun` names them. Hardware is
chosen as ``backend:name``, because two backends may call different machines alike; a browser shows
the chosen backend's only, and without JavaScript they stand in groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from django import forms
from django.contrib.auth.models import User

from dashboard.forms.fields import DurationField, TellingSelect, dress
from dashboard.forms.huggingface import parse_object
from dashboard.presentation import formats
from executors.base import Capabilities
from executors.catalogue import Hardware
from executors.registry import BACKENDS
from runs.backends.executors import capabilities_of, catalogue, usable_backends
from runs.local_access import LOCAL, can_use_local
from runs.models import Credential, Webhook
from runs.submit.run_draft import PoolDraft

ROWS = 32
"""Pools a form takes."""

_ROW = re.compile(r"pools\.(\d{1,4})\.\w+")

Choices = list[tuple[str, str | list[tuple[str, str]]]]


@dataclass(frozen=True, kw_only=True)
class PoolChoices:
    """What every row offers, read once for all of them. ``told`` is by value of an option."""

    backends: Choices
    hardware: Choices
    credentials: Choices
    stores: Choices
    webhooks: list[tuple[str, str]]
    told: Mapping[str, Mapping[str, Any]]
    first: PoolDraft
    """What a new row shows: a backend that the user has permission for, if there is one."""

    @classmethod
    def load(cls, user: User | None = None) -> PoolChoices:
        """Two queries; the catalogue is in memory. With ``user``, a backend that they have no
        permission for says so."""
        backends = usable_backends()
        by_kind: dict[str, list[tuple[str, str]]] = {}
        told: dict[str, dict[str, Any]] = {}
        for credential in Credential.objects.order_by("name"):
            pk, kind = str(credential.pk), credential.kind
            by_kind.setdefault(kind, []).append((pk, credential.name))
            told[pk] = {"backend": kind}
            if kind in backends:
                told[pk] |= _can(capabilities_of(kind, credential))
        hardware: Choices = []
        for backend, label in backends.items():
            found = catalogue().of(backend)
            told[backend] = _can(capabilities_of(backend))
            told |= {f"{backend}:{h.name}": _costs(h) for h in found}
            hardware.append((label, [(f"{backend}:{h.name}", hardware_text(h)) for h in found]))
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
            webhooks=[
                (str(pk), name)
                for pk, name in Webhook.objects.filter(enabled=True).values_list("pk", "name")
            ],
            told=told,
            first=_first_pool(user, backends),
        )


def _permitted(backend: str, label: str, user: User | None) -> str:
    if backend != LOCAL or user is None or can_use_local(user):
        return label
    return f"{label} (not permitted: ask an administrator)"


def _can(can: Capabilities) -> dict[str, Any]:
    """As ``data-`` attributes: of a backend, and of a credential, whose options may differ."""
    return {
        "remote": can.remote,
        "regions": "|".join(can.regions),
        "spot": can.spot,
        "images": can.images,
        "longest": formats.duration(can.max_lifetime_s) if can.max_lifetime_s else "",
    }


def _costs(hardware: Hardware) -> dict[str, Any]:
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
    said = re.findall(r"[\d.]+ (?:v?CPU|core|GiB)", hardware.label)  # some labels say all of it
    if hardware.cpus is not None and not said:
        parts.append(f"{hardware.cpus:g} CPU{'' if hardware.cpus == 1 else 's'}")
    if hardware.memory_gib is not None and not said:
        parts.append(f"{hardware.memory_gib:g} GiB")
    if hardware.price_usd_h is None:
        parts.append("price unknown")
    elif hardware.price_usd_h:
        parts.append(f"{formats.money(hardware.price_usd_h)}/h")
    return " · ".join(parts)


class PoolForm(forms.Form):
    """Field names are :class:`~runs.submit.run_draft.PoolDraft`'s."""

    backend = forms.ChoiceField(label="Backend")
    hardware = forms.ChoiceField(label="Hardware")
    count = forms.IntegerField(label="Replicas", min_value=1, max_value=1024)
    credential = forms.ChoiceField(label="Credential", required=False)
    region = forms.CharField(
        label="Region", required=False, max_length=64, help_text="Empty: the backend's choice."
    )
    timeout_s = DurationField(
        label="Deadline of a job",
        help_text="Such as 1d 6h; then the replica goes on in a new job. "
        "Empty: the longest allowed.",
    )
    image = forms.CharField(
        label="Image",
        required=False,
        max_length=300,
        help_text="Empty: the backend's default.",
    )
    price_usd_h = forms.FloatField(
        label="Price",
        required=False,
        min_value=0,
        help_text="Of one replica; the list does not know it. Empty: unknown.",
    )
    max_price_usd_h = forms.FloatField(
        label="Max price",
        required=False,
        min_value=0,
        help_text="Of one replica. What costs more is not launched. Empty: any.",
    )
    options = forms.CharField(
        label="Options",
        required=False,
        max_length=20_000,
        help_text="The backend's own, as a JSON object.",
    )
    spot = forms.BooleanField(
        label="Spot",
        required=False,
        help_text="Cheaper machines that may be taken away at any time.",
    )

    def __init__(
        self,
        data: Any = None,
        *,
        index: int | str,
        choices: PoolChoices,
        initial: dict[str, Any] | None = None,
    ) -> None:
        self.index = index
        super().__init__(data, initial=initial, prefix=f"pools.{index}")
        for name, options in (
            ("backend", choices.backends),
            ("hardware", choices.hardware),
            ("credential", choices.credentials),
        ):
            field = self.fields[name]
            assert isinstance(field, forms.ChoiceField)
            field.widget = TellingSelect(choices.told)
            field.choices = options
        dress(self)

    def add_prefix(self, field_name: str) -> str:
        return f"{self.prefix}.{field_name}"

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        try:
            cleaned["options"] = parse_object(cleaned.get("options", ""))
        except ValueError as error:
            self.add_error("options", f"expected a JSON object: {error}")
        else:
            if not isinstance(cleaned["options"], dict):
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
        """Of a row that is valid."""
        values = self.cleaned_data
        return PoolDraft(
            **{
                field.name: values[field.name]
                for field in fields(PoolDraft)
                if field.name in values and field.name != "credential"
            },
            credential=int(values["credential"]) if values["credential"] else None,
        )

    def forget_errors(self) -> None:
        """Show what was typed as it is: the row was sent to be changed, not to be launched."""
        self._errors = forms.utils.ErrorDict()
        self.cleaned_data = {}

    def place(self, field: str, message: str) -> None:
        """Put a domain error at its field, or at the backend where the row has no such field."""
        self.is_valid()  # before, there is no place for errors
        self.add_error(field if field in self.fields else "backend", message)

    def named_errors(self) -> Iterator[tuple[str, list[str]]]:
        for name, errors in self.errors.items():
            yield (
                self.add_prefix("backend" if name == "__all__" else name),
                [str(e) for e in errors],
            )


def _first_pool(user: User | None, backends: Iterable[str]) -> PoolDraft:
    if user is None or can_use_local(user):
        return PoolDraft()
    found = (
        PoolDraft(backend=backend, hardware=hardware.name)
        for backend in backends
        if backend != PoolDraft.backend
        for hardware in catalogue().of(backend)
    )
    return next(found, PoolDraft())


def initial_of(pool: PoolDraft) -> dict[str, Any]:
    """A pool as its row shows it."""
    return {
        **{field.name: getattr(pool, field.name) for field in fields(PoolDraft)},
        "hardware": f"{pool.backend}:{pool.hardware}",
        "options": json.dumps(dict(pool.options)) if pool.options else "",
        "credential": "" if pool.credential is None else str(pool.credential),
    }


def posted_rows(data: Any) -> list[int]:
    """Indices of the rows in what was sent, in order. Rows that were removed leave gaps."""
    found = {int(match[1]) for name in data if (match := _ROW.fullmatch(name))}
    return sorted(found)[:ROWS]
