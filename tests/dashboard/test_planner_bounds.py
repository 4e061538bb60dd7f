"""What the planner may be asked is one thing, whether its page or the API is asked; and whatever
may be asked is answered, with numbers, by arithmetic that does not grow with the model."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from django.test import Client

from dashboard.forms.planner import EXAMPLE, Bounds, bounds_of
from diloco.protocol.blocks import Span
from diloco.protocol.reduce_cost import round_cost
from diloco.protocol.setting_spec import SettingsError
from runs.submit.planner import Question, plan
from tests.browser import seed

NAMES = [field.name for field in dataclasses.fields(Question)]
NUMBERS = [name for name in NAMES if not bounds_of(name).choices]


def beyond(bounds: Bounds) -> dict[str, Any]:
    """What is a little too small and a little too large."""
    if bounds.whole:
        return {"least": int(bounds.least) - 1, "most": int(bounds.most) + 1}
    return {"least": bounds.least * 0.99 if bounds.least else -0.01, "most": bounds.most * 1.01}


@pytest.fixture
def asking(client: Client, db: None) -> Client:
    client.force_login(seed.user("olga", "operator"))
    return client


def of_api(client: Client, change: dict[str, Any]) -> dict[str, str]:
    """What it says is wrong, by field."""
    question = dataclasses.asdict(EXAMPLE) | change
    answer = client.post("/api/planner", question, content_type="application/json")
    if answer.status_code == 200:
        return {}
    assert answer.status_code == 422, answer.content
    return {error["field"]: error["message"] for error in answer.json()["errors"]}


def of_page(client: Client, change: dict[str, Any]) -> dict[str, str]:
    errors = client.get("/planner.json", change).json()["errors"]
    return {field: " ".join(said) for field, said in errors.items()}


@pytest.mark.parametrize("name", NUMBERS)
def test_page_and_api_refuse_the_same(asking: Client, name: str) -> None:
    for value in beyond(bounds_of(name)).values():
        for said in (of_page(asking, {name: value}), of_api(asking, {name: value})):
            assert set(said) == {name}
            assert "expected" in said[name] and "found" in said[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NUMBERS])
def test_page_and_api_know_the_same_words(asking: Client, name: str) -> None:
    for choice in bounds_of(name).choices:
        assert of_page(asking, {name: choice}) == of_api(asking, {name: choice}) == {}
    assert set(of_page(asking, {name: "zip"})) == set(of_api(asking, {name: "zip"})) == {name}


@pytest.mark.parametrize("name", NUMBERS)
def test_page_and_api_take_the_bounds_themselves(asking: Client, name: str) -> None:
    """Other settings may forbid them, but in the same words."""
    bounds = bounds_of(name)
    for value in (bounds.least, bounds.most):
        given = int(value) if bounds.whole else value
        page, api = of_page(asking, {name: given}), of_api(asking, {name: given})
        assert page == api
        assert set(page) <= {"num_fragments", "overlap_steps", "min_quorum", "parameters"}


def test_the_largest_model_is_planned_without_a_list_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list took more memory than there is; no more spans than shards are made now."""
    made = 0

    def counted(self: Span, start: int, stop: int) -> None:
        nonlocal made
        made += 1
        assert made < 10_000, "a span for each part"
        vars(self).update(start=start, stop=stop)

    monkeypatch.setattr(Span, "__init__", counted)
    round_cost.cache_clear()
    largest = int(bounds_of("parameters").most)
    for mode in bounds_of("reduce_plan").choices:
        found = plan(dataclasses.replace(EXAMPLE, parameters=largest, reduce_plan=mode))
        assert found.chosen.up_bytes > largest


def test_every_corner_of_what_may_be_asked_has_an_answer_in_numbers() -> None:
    chance = random.Random(0)
    answered = 0
    for _ in range(200):
        question = dataclasses.replace(EXAMPLE, **{name: corner(chance, name) for name in NAMES})
        try:
            found = plan(question)
        except SettingsError as error:  # what settings allow together
            assert "expected" in error.message and "found" in error.message
            continue
        answered += 1
        json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert answered > 50


def corner(chance: random.Random, name: str) -> Any:
    bounds = bounds_of(name)
    if bounds.choices:
        return chance.choice(bounds.choices)
    if name in ("num_fragments", "overlap_steps", "min_quorum"):
        return int(bounds.least)  # the largest seldom go with the others
    if name in ("mtbf_h", "usd_h") and chance.random() < 0.3:
        return None
    value = chance.choice([bounds.least, bounds.most, getattr(EXAMPLE, name)])
    return int(value) if bounds.whole else value
