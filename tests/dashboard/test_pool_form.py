"""Pool rows of the submit form: options, parsing, and errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from django.utils.html import escape

from dashboard.forms import PoolChoices, PoolForm, RunForm, initial_from
from dashboard.forms.fields import DataSelect, parse_seconds, write_seconds
from executors.options import is_fixed
from executors.registry import BACKENDS, DESCRIPTIONS
from runs.actions.credentials import save_credential
from runs.backends.executors import catalogue
from runs.models import Credential, Run
from runs.submit import run_draft
from runs.submit.run_draft import PoolDraft
from tests.dashboard.stub_backend import Stub, stubbed

pytestmark = pytest.mark.django_db

LOCAL = PoolDraft(backend="local", hardware="cpu", count=3)
MODAL = PoolDraft(
    backend="modal",
    hardware="H100",
    count=2,
    region="us-east",
    spot=True,
    image="me/image:1",
    timeout_s=5400,
    price_usd_h=3.5,
)


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


def credential(kind: str, name: str) -> Credential:
    created = Credential(kind=kind, name=name)
    save_credential(created, typed={"MODAL_TOKEN_ID": "ak-very-secret"}, actor=None)
    return created


def sent(*pools: PoolDraft, **changes: str) -> dict[str, str]:
    """Return the form that a browser posts for the local demo with other pools."""
    draft = dataclasses.replace(run_draft.local_demo(), pools=pools)
    initial = initial_from(draft)
    rows = initial.pop("pools")
    values = {name: str(value) for name, value in initial.items() if value != []}
    values["time_limit_s"] = "30m"
    values["start_timeout_s"] = ""
    values["submit_key"] = "k"
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name == "timeout_s":
                value = write_seconds(value)
            if value not in (None, False) and name != "options":
                values[f"pools.{index}.{name}"] = "on" if value is True else str(value)
    return values | changes


# Parsing.


def test_rows_become_pools_and_their_sum_is_the_target() -> None:
    form = RunForm(sent(LOCAL, MODAL))
    draft = form.draft()
    assert draft is not None, form.all_errors
    assert draft.pools == (LOCAL, MODAL)
    assert draft.settings.num_replicas == 5


def test_initial_values_round_trip() -> None:
    draft = dataclasses.replace(run_draft.local_demo(), budget_usd=12.5, start_timeout_s=900)
    form = RunForm(initial=initial_from(draft))
    assert form["start_timeout_s"].value() == "15m"
    assert form["time_limit_s"].value() == "30m"
    assert form["budget_usd"].value() == "12.5"
    assert form.pools[0]["hardware"].value() == "local:cpu"


def test_gaps_of_removed_rows_are_ignored() -> None:
    values = sent(LOCAL, LOCAL, MODAL)
    values = {name: value for name, value in values.items() if not name.startswith("pools.1.")}
    draft = RunForm(values).draft()
    assert draft is not None
    assert draft.pools == (LOCAL, MODAL)


def test_domain_errors_find_their_row_despite_gaps() -> None:
    values = sent(LOCAL, LOCAL, MODAL)
    values = {name: value for name, value in values.items() if not name.startswith("pools.1.")}
    form = RunForm(values)
    assert form.draft() is not None
    form.point_at("pools.1.region", "there is no such region")  # of the draft's second pool
    assert form.all_errors == {"pools.2.region": ["there is no such region"]}


@pytest.mark.parametrize(
    ("change", "field", "output"),
    [
        ({"pools.1.count": "0"}, "pools.1.count", "greater than or equal to 1"),
        ({"pools.1.count": ""}, "pools.1.count", "required"),
        ({"pools.1.backend": "moon"}, "pools.1.backend", "moon is not one of"),
        ({"pools.1.hardware": "local:cpu"}, "pools.1.hardware", "expected hardware of Modal"),
        ({"pools.1.hardware": "modal:none"}, "pools.1.hardware", "modal:none is not one of"),
        ({"pools.1.timeout_s": "90"}, "pools.1.timeout_s", "such as 90m or 2h 30m, not '90'"),
        ({"pools.1.price_usd_h": "-1"}, "pools.1.price_usd_h", "greater than or equal to 0"),
        ({"pools.1.credential": "77"}, "pools.1.credential", "77 is not one of"),
        ({"pools.1.region": "x" * 65}, "pools.1.region", "at most 64 characters"),
    ],
)
def test_row_errors_are_shown_at_their_field(
    change: dict[str, str], field: str, output: str
) -> None:
    form = RunForm(sent(LOCAL, MODAL) | change)
    assert form.draft() is None
    assert list(form.all_errors) == [field]
    assert output in form.all_errors[field][0]


def test_the_list_of_errors_names_the_pool(client: Client, operator_user: Any) -> None:
    for pools, label in (((LOCAL, MODAL), "Replicas of pool 2"), ((LOCAL,), "Replicas")):
        field = f"pools.{len(pools) - 1}.count"
        page = client.post("/runs/new", sent(*pools) | {field: "0"}).content.decode()
        assert f">{label}</a>: " in page


def test_a_credential_of_another_backend_is_rejected() -> None:
    other = credential("kubernetes", "a cluster")
    form = RunForm(sent(LOCAL, MODAL) | {"pools.1.credential": str(other.pk)})
    assert form.draft() is None
    assert form.all_errors == {
        "pools.1.credential": ["expected a credential for Modal, found one for Kubernetes"]
    }


def test_too_many_replicas_are_reported_at_the_last_row() -> None:
    form = RunForm(sent(dataclasses.replace(LOCAL, count=1024), MODAL))
    assert form.draft() is None
    assert list(form.all_errors) == ["pools.1.count"]


def test_a_form_without_rows_shows_an_empty_row_with_errors() -> None:
    form = RunForm({k: v for k, v in sent(LOCAL).items() if not k.startswith("pools.")})
    assert form.draft() is None
    assert "pools.0.backend" in form.all_errors


@pytest.mark.parametrize(("start", "replicas"), [("wait", 0), ("quorum", 2), ("all", 5)])
def test_the_start_policy_is_a_group_setting(start: str, replicas: int) -> None:
    draft = RunForm(sent(LOCAL, MODAL) | {"start": start, "min_quorum": "2"}).draft()
    assert draft is not None
    assert draft.settings.start_replicas == replicas


# Options.


def test_hardware_labels_have_specs_and_price() -> None:
    text = dict(
        pair
        for _, group in PoolChoices.load().hardware
        for pair in group
        if isinstance(group, list)
    )
    known = catalogue().get("modal", "H100")
    assert known is not None
    assert known.label in text["modal:H100"]
    assert f"{known.gpu_memory_gib:g} GiB GPU" in text["modal:H100"]
    assert f"${known.price_usd_h:.2f}/h" in text["modal:H100"]


def test_options_have_the_capabilities_of_the_backend(modal: Stub) -> None:
    page = str(PoolForm(index=0, choices=PoolChoices.load())["backend"])
    option = re.search(r'<option value="modal"[^>]*>', page)
    assert option is not None
    assert 'data-regions="us-east|eu-west"' in option[0]
    assert 'data-spot="1"' in option[0]
    assert 'data-longest="1d 00h"' in option[0]
    local = re.search(r'<option value="local"[^>]*>', page)
    assert local is not None
    assert "data-remote" not in local[0]
    assert "data-images" not in local[0]


def test_a_broken_backend_is_still_offered(modal: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.dashboard import stub_backend

    def broken(self: Any, config: Any) -> None:
        raise ValueError("options: expected a namespace, found nothing")

    monkeypatch.setattr(stub_backend.StubExecutor, "__init__", broken)
    assert dict(PoolChoices.load().backends).keys() == BACKENDS.keys()


def test_credentials_are_grouped_by_backend_without_secrets(
    client: Client, operator_user: Any
) -> None:
    own, bucket = credential("modal", "Team account"), credential("store", "Bucket eu-west")
    page = client.get("/runs/new").content.decode()
    assert f'value="{own.pk}" data-backend="modal"' in page
    pool, store = (
        re.search(rf'name="{name}"[^>]*>.*?</select>', page, re.DOTALL)[0]  # type: ignore[index]
        for name in (r"pools\.0\.credential", "store_credential")
    )
    assert "Team account" in pool
    assert "Bucket eu-west" not in pool
    assert "Bucket eu-west" in store
    assert "Team account" not in store
    assert str(bucket.pk) in store
    assert "ak-very-secret" not in page


@pytest.mark.parametrize("rows", [1, 8])
def test_the_number_of_queries_does_not_depend_on_rows(
    rows: int, operator_user: Any, django_assert_num_queries: Any
) -> None:
    for n in range(rows):
        credential("modal", f"account {n}")
    with django_assert_num_queries(3):  # credentials, webhooks, trackers
        RunForm(sent(*[LOCAL] * rows)).draft()


# Without JavaScript.


def test_adding_a_row_keeps_the_input(client: Client, operator_user: Any) -> None:
    response = client.post(
        "/runs/new", sent(MODAL, name="Kept", sync_every="0") | {"add_pool": "1"}
    )
    assert response.status_code == 200
    page = response.content.decode()
    assert 'name="pools.1.backend"' in page
    assert 'value="Kept"' in page
    assert 'value="me/image:1"' in page
    assert "Nothing was launched" not in page
    assert response.context["form"].all_errors == {}
    assert not Run.objects.exists()


def test_a_row_can_be_removed_but_not_the_last(client: Client, operator_user: Any) -> None:
    page = client.post("/runs/new", sent(LOCAL, MODAL) | {"remove_pool": "0"}).content.decode()
    shown = re.sub(r"<template.*?</template>", "", page, flags=re.DOTALL)
    assert set(re.findall(r'name="pools\.(\d+)\.backend"', shown)) == {"1"}
    page = client.post("/runs/new", sent(LOCAL) | {"remove_pool": "0"}).content.decode()
    assert 'name="pools.0.backend"' in page


def test_texts_of_a_row_are_escaped(client: Client, operator_user: Any) -> None:
    evil = dataclasses.replace(MODAL, image='"><script>x</script>')
    page = client.post("/runs/new", sent(evil) | {"add_pool": "1"}).content.decode()
    assert "<script>x" not in page


def test_the_form_explains_the_options_of_each_backend(client: Client, operator_user: Any) -> None:
    page = client.get("/runs/new").content.decode()
    for description in DESCRIPTIONS.values():
        _, heading, rest = page.partition(f"<h3>{description.label}</h3>")
        assert heading
        listed = rest.partition("</dl>")[0]
        for option in description.declared_options.values():
            assert (f"<code>{option.name}</code>" in listed) == (not is_fixed(option))
            assert is_fixed(option) or escape(option.label) in listed
            assert is_fixed(option) or escape(option.help) in listed


# Durations.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0),
        ("90m", 5400),
        ("2h 30m", 9000),
        ("1d6h", 108_000),
        ("1.5 h", 5400),
        ("45s", 45),
        ("10 min", 600),
        ("1D", 86_400),
    ],
)
def test_durations_are_parsed(text: str, seconds: int) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["90", "2 hours", "-1h", "h", "1h and", "9" * 30 + "d", "1e3s"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(ValueError, match="Enter"):
        parse_seconds(text)


@pytest.mark.parametrize("seconds", [0, 1, 59, 60, 3661, 86_400, 90_061])
def test_durations_round_trip(seconds: int) -> None:
    assert parse_seconds(write_seconds(seconds)) == seconds


def test_options_of_a_select_are_escaped_and_need_no_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = {"b": {"regions": 'eu"|us', "spot": True, "longest": "", "price": None}}
    select = DataSelect(data, attrs={"class": "input"})
    select.choices = [("", "None"), ("A & Co", [("a", "<a>"), ("b", "B")])]
    monkeypatch.setattr(select, "_render", None)
    assert select.render("x", "b", {"id": "i", "required": True}) == (
        '<select name="x" class="input" id="i" required><option value="">None</option>'
        '<optgroup label="A &amp; Co"><option value="a">&lt;a&gt;</option>'
        '<option value="b" data-regions="eu&quot;|us" data-spot="1" selected>B</option>'
        "</optgroup></select>"
    )
    assert '<option value="" selected>' in select.render("x", None)
