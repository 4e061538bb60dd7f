"""The planner page: inputs in the URL, errors at their fields, link to the prefilled form."""

from __future__ import annotations

import html
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.test import Client

from dashboard.forms.planner import EXAMPLE, NumberField, write_number
from diloco.protocol.workload import GPT_SIZES
from runs.submit.planner import plan
from tests.browser import seed

pytestmark = pytest.mark.django_db


def test_without_parameters_the_page_shows_the_example(client: Client, operator_user: Any) -> None:
    response = client.get("/planner")
    assert response.status_code == 200
    assert response.context["plan"] == plan(EXAMPLE)


def test_the_url_holds_every_input(client: Client, operator_user: Any) -> None:
    sent = {
        "parameters": "150M",
        "num_replicas": "16",
        "sync_every": "50",
        "codec": "int8",
        "num_fragments": "5",
        "overlap_steps": "2",
        "mbit_s": "100",
        "latency_s": "0.05",
        "mtbf_h": "",
        "usd_h": "1.5",
        "tokens": "3B",
    }
    chosen = client.get("/planner.json", sent).json()
    result = parse_qs(chosen["query"], keep_blank_values=True)
    assert {name: result[name][0] for name in sent} == sent
    again = client.get("/planner.json?" + chosen["query"]).json()
    assert again == chosen
    assert chosen["plan"]["chosen"]["failures"] == 0


@pytest.mark.parametrize(
    ("change", "field", "output"),
    [
        ({"parameters": "many"}, "parameters", "Enter a number such as 2.5, 500k or 1B"),
        ({"parameters": "1.5"}, "parameters", "whole number"),
        ({"mbit_s": "0"}, "mbit_s", "from 0.001 to 1e+07"),
        ({"parameters": "101T"}, "parameters", "from 1 to 1e+14"),
        ({"latency_s": "-1"}, "latency_s", "Enter a number"),
        ({"sync_every": "0"}, "sync_every", "expected 1 or more"),
        ({"num_fragments": "3"}, "num_fragments", "divisor of the 100 local steps"),
        ({"codec": "zip"}, "codec", "zip is not one of the available choices"),
        ({"hardware": "modal:abacus"}, "hardware", "not one of the available choices"),
        ({"parameters": "1", "num_fragments": "2"}, "parameters", "at least one for each"),
        ({"tokens": ""}, "tokens", "required"),
    ],
)
def test_planner_errors_are_shown_at_their_field(
    client: Client, operator_user: Any, change: dict[str, str], field: str, output: str
) -> None:
    response = client.get("/planner", change)
    assert response.status_code == 422
    assert output in " ".join(response.context["form"].errors[field])
    assert html.escape(next(iter(change.values())), quote=True) in response.content.decode()
    body = client.get("/planner.json", change).json()
    assert body["plan"] is None
    assert field in body["errors"]


def test_the_list_price_of_the_hardware_is_the_default(client: Client, operator_user: Any) -> None:
    def usd(**sent: str) -> Any:
        chosen = client.get("/planner.json", {"parameters": "1B", **sent}).json()["plan"]["chosen"]
        return chosen["hardware_usd"]

    assert usd(usd_h="", hardware="") is None
    assert usd(usd_h="", hardware="local:cpu") == 0
    assert usd(usd_h="", hardware="modal:H100") > 0
    assert usd(usd_h="2", hardware="modal:H100") == pytest.approx(usd(usd_h="2"))


def test_viewers_can_plan_but_not_launch(client: Client) -> None:
    client.force_login(seed.user("vera", "viewer"))
    page = client.get("/planner").content.decode()
    assert "Use these settings" not in page


def test_users_without_a_role_are_rejected(client: Client) -> None:
    client.force_login(seed.user("no-role", ""))
    assert client.get("/planner").status_code == 403
    assert client.get("/planner.json").status_code == 403


def test_a_plan_needs_no_query(
    client: Client, operator_user: Any, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(3):  # session, user, role
        client.get("/planner.json", {"num_replicas": "64"})


@pytest.mark.parametrize("text", ["1B", "500k", "1e9", "2.5", "1,000", "0.1", "20 M", "7_000"])
def test_numbers_round_trip(text: str) -> None:
    field = NumberField()
    value = field.to_python(text)
    assert field.to_python(write_number(value)) == value


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", "--1", "1BB", "0x10", "", "1e-400"])
def test_invalid_numbers_are_rejected(text: str) -> None:
    from django import forms

    field = NumberField(least=1e-6, most=1e12)
    if text == "":
        assert field.to_python(text) is None
        return
    with pytest.raises(forms.ValidationError):
        field.to_python(text)


def test_use_these_settings_opens_the_form_prefilled(client: Client, operator_user: Any) -> None:
    shape = GPT_SIZES["small"]
    sent = {
        "parameters": str(shape.parameters),
        "num_replicas": "6",
        "sync_every": "80",
        "codec": "int8",
        "num_fragments": "4",
        "overlap_steps": "3",
        "min_quorum": "2",
        "tokens_per_step": str(shape.context * 16),
        "tokens": "1M",
        "hardware": "local:cpu",
    }
    page = client.get("/planner", sent).content.decode()
    link = re.search(r'data-use href="([^"]+)"', page)
    assert link is not None
    form = client.get(html.unescape(link[1])).context["form"]
    expected = {
        "size": "small",
        "sync_every": "80",
        "codec": "int8",
        "num_fragments": "4",
        "overlap_steps": "3",
        "min_quorum": "2",
        "batch_size": "16",
        "max_tokens": "1000000",
    }
    assert {name: str(form[name].value()) for name in expected} == expected
    (pool,) = form.pools
    assert str(pool["count"].value()) == "6"
    assert pool["hardware"].value() == "local:cpu"
    assert urlsplit(link[1]).path == "/runs/new"
