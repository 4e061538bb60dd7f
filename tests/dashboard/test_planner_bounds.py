"""The planner's page and the API have the same bounds. Every input within them gives a finite
result in time that does not depend on the size of the model."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from typing import Any

import pytest
from django.test import Client

from dashboard.forms.planner import EXAMPLE, Bounds, bounds_of
from diloco.protocol.blocks import Span
from diloco.protocol.reduce_cost import round_cost
from diloco.protocol.setting_spec import SettingsError
from runs.submit.planner import PlannerInputs, plan
from tests.browser import seed
from tests.matrix import matrix

NAMES = [field.name for field in dataclasses.fields(PlannerInputs)]
NUMBERS = [name for name in NAMES if not bounds_of(name).choices]


def beyond(bounds: Bounds) -> dict[str, Any]:
    """Values slightly below and above the bounds."""
    if bounds.whole:
        return {"least": int(bounds.least) - 1, "most": int(bounds.most) + 1}
    return {"least": bounds.least * 0.99 if bounds.least else -0.01, "most": bounds.most * 1.01}


@pytest.fixture
def asking(client: Client, db: None) -> Client:
    client.force_login(seed.user("olga", "operator"))
    return client


def of_api(client: Client, change: dict[str, Any]) -> dict[str, str]:
    """Reported errors by field."""
    question = dataclasses.asdict(EXAMPLE) | change
    response = client.post("/api/planner", question, content_type="application/json")
    if response.status_code == 200:
        return {}
    assert response.status_code == 422, response.content
    return {error["field"]: error["message"] for error in response.json()["errors"]}


def of_page(client: Client, change: dict[str, Any]) -> dict[str, str]:
    errors = client.get("/planner.json", change).json()["errors"]
    return {field: " ".join(output) for field, output in errors.items()}


@matrix("name", NUMBERS, fast=4)
def test_page_and_api_reject_the_same_values(asking: Client, name: str) -> None:
    for value in beyond(bounds_of(name)).values():
        for output in (of_page(asking, {name: value}), of_api(asking, {name: value})):
            assert set(output) == {name}
            assert re.search(r"expected .* found|Enter .* not", output[name])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NUMBERS])
def test_page_and_api_accept_the_same_choices(asking: Client, name: str) -> None:
    for choice in bounds_of(name).choices:
        assert of_page(asking, {name: choice}) == of_api(asking, {name: choice}) == {}
    assert set(of_page(asking, {name: "zip"})) == set(of_api(asking, {name: "zip"})) == {name}


@matrix("name", NUMBERS, fast=4)
def test_page_and_api_accept_the_bounds(asking: Client, name: str) -> None:
    """Other settings can forbid them, but with the same message."""
    bounds = bounds_of(name)
    for value in (bounds.least, bounds.most):
        given = int(value) if bounds.whole else value
        page, api = of_page(asking, {name: given}), of_api(asking, {name: given})
        assert page == api
        assert set(page) <= {"num_fragments", "overlap_steps", "min_quorum", "parameters"}


def test_the_largest_model_is_planned_in_constant_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of spans took more memory than available; now there are as many spans as shards."""
    created = 0

    def counted(self: Span, start: int, stop: int) -> None:
        nonlocal created
        created += 1
        assert created < 100_000, "a span for each part"
        vars(self).update(start=start, stop=stop)

    monkeypatch.setattr(Span, "__init__", counted)
    round_cost.cache_clear()
    largest = int(bounds_of("parameters").most)
    for mode in bounds_of("reduce_plan").choices:
        result = plan(dataclasses.replace(EXAMPLE, parameters=largest, reduce_plan=mode))
        assert result.chosen.up_bytes > largest


@pytest.mark.slow
def test_every_corner_of_the_bounds_gives_finite_numbers() -> None:
    chance = random.Random(0)
    answered = 0
    for _ in range(200):
        question = dataclasses.replace(EXAMPLE, **{name: corner(chance, name) for name in NAMES})
        try:
            result = plan(question)
        except SettingsError as error:  # combinations that the settings forbid
            assert "expected" in error.message and "found" in error.message
            continue
        answered += 1
        json.dumps(dataclasses.asdict(result), allow_nan=False)
    assert answered > 50


def corner(chance: random.Random, name: str) -> Any:
    bounds = bounds_of(name)
    if bounds.choices:
        return chance.choice(bounds.choices)
    if name in ("num_fragments", "overlap_steps", "min_quorum"):
        return int(bounds.least)  # the largest values rarely fit together
    if name in ("mtbf_h", "usd_h") and chance.random() < 0.3:
        return None
    value = chance.choice([bounds.least, bounds.most, getattr(EXAMPLE, name)])
    return int(value) if bounds.whole else value
