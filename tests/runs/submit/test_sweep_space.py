"""Fields and values of a sweep, their bounds, and the runs that result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.settings import setting_fields
from runs.exceptions import InvalidRun
from runs.submit.run_draft import RunDraft, local_demo
from runs.submit.sweep_space import (
    MOST_RUNS,
    TEXT_LENGTH,
    Parameter,
    combinations,
    draft_with,
    parameters_of,
    parse_lines,
)

DEMO = local_demo()


def of(field: str, values: Any, draft: RunDraft = DEMO) -> tuple[Any, ...]:
    [parameter] = parameters_of([(field, values)], draft)
    return parameter.values


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("inner_lr", "1e-4, 3e-4,1e-3", (1e-4, 3e-4, 1e-3)),
        ("settings.inner_lr", [1e-4, 1e-3], (1e-4, 1e-3)),
        ("Inner learning rate", [1e-4, 1e-3], (1e-4, 1e-3)),
        ("inner_lr", "1e-4..1e-2 x3 log", (1e-4, 1e-3, 1e-2)),
        ("inner_lr", "0..1 x5", (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("inner_lr", "0.00012345..1 x2", (0.00012345, 1.0)),
        ("sync_every", "2..8 x4", (2, 4, 6, 8)),
        ("sync_every", "1..3 x9", (1, 2, 3)),
        ("batch_size", "8, 16", (8, 16)),
        ("codec", "bf16, int8", ("bf16", "int8")),
        ("workload.size", "demo, micro", ("demo", "micro")),
        ("workload.eval_bytes", [1024, 2048], (1024, 2048)),
    ],
)
def test_values(field: str, values: Any, expected: tuple[Any, ...]) -> None:
    assert (
        of(field, values) == pytest.approx(expected)
        if isinstance(expected[0], float)
        else of(field, values) == expected
    )


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("inner_lr", "1e-4", "expected values that make 2 to 100 runs, found 1"),
        ("inner_lr", "1,1", "found 1"),
        ("inner_lr", "a, b", "expected a number, found 'a'"),
        ("inner_lr", "1,,2", "between two commas"),
        ("inner_lr", "1, inf", "expected a number, found 'inf'"),
        ("inner_lr", "1, 11", "expected 10 or less, found 11"),
        ("inner_lr", "0..1 x3 log", "above 0"),
        ("inner_lr", f"0..1 x{MOST_RUNS + 1}", "expected x2 to x100"),
        ("inner_lr", "0..1 x0", "expected x2 to x100"),
        ("inner_lr", "1e-300..1e300 x3 log", "expected 10 or less, found 1e+300"),
        ("inner_lr", "-1e308..1e308 x3", "expected 0 or more, found -1e+308"),
        ("inner_lr", "1e308..1.797e308 x3 log", "expected 10 or less"),
        ("inner_lr", "1.79769e308..1.79769e308 x3", "expected finite values"),
        ("sync_every", "1..1e300 x3", "expected a finite number"),
        ("workload.eval_bytes", "1..1e300 x3", "workload.eval_bytes: expected whole numbers"),
        ("workload.eval_bytes", [True, 2], "workload.eval_bytes: expected whole numbers"),
        ("workload.eval_bytes", "0, 2", "workload.eval_bytes: expected 1 or more, found 0"),
        ("workload.size", [1, 2], "workload.size: "),
        ("workload.data", ["", "stdlib"], "workload.data: "),
        ("inner_lr", "9" * 5000, "expected a number"),
        ("batch_size", "1.5, 2", "expected a whole number"),
        ("batch_size", [True, 2], "expected a whole number"),
        ("inner_lr", [[1], [2]], "numbers or text"),
        ("inner_lr", {"a": 1}, "expected a list of values"),
        ("inner_lr", list(range(1, MOST_RUNS + 2)), "expected at most 100 values"),
        ("sync_every", list(range(1, MOST_RUNS + 2)), "expected at most 100 values"),
        ("codec", "fp32, fp64", "expected one of fp32"),
        ("codec", "1..2 x2", "found a range"),
        ("num_replicas", "1,2", "expected a group setting"),
        ("nothing", "1,2", "expected a group setting, found 'nothing'"),
        ("learning rate", "1,2", "found 'learning rate'; did you mean outer_lr or inner_lr?"),
        ("workload.kind", "a,b", "of the workload"),
        ("workload.size", "demo, giant", "workload.size: "),
        ("pools.0.count", "1,2", "of the workload"),
    ],
)
def test_a_wrong_value_names_what_to_enter(field: str, values: Any, message: str) -> None:
    with pytest.raises(InvalidRun) as error:
        of(field, values)
    assert error.value.field == "sweep"
    assert message in error.value.message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
RANGES = st.builds(
    "{}..{} x{}{}".format,
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.integers(0, 120),
    st.sampled_from(["", " log"]),
)
FIELDS = st.sampled_from([spec.name for spec in setting_fields()]) | st.sampled_from(
    ["workload.eval_bytes", "workload.size", "workload.data", "workload.data_format", "name"]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(field=FIELDS, values=VALUES | RANGES)
def test_any_value_is_refused_by_name_or_makes_runs(field: str, values: Any) -> None:
    try:
        parameters = parameters_of([(field, values)], DEMO)
        drafts = [draft_with(DEMO, each) for each in combinations(parameters)]
    except InvalidRun as error:
        assert error.field == "sweep"
        return
    assert 2 <= len(drafts) <= MOST_RUNS
    json.dumps([draft.to_dict() for draft in drafts], allow_nan=False)


def test_the_grid_is_bounded_before_it_is_built() -> None:
    values = list(range(1, MOST_RUNS + 1))
    with pytest.raises(InvalidRun, match="found 10,000"):
        parameters_of([("sync_every", values), ("batch_size", values)], DEMO)
    with pytest.raises(InvalidRun, match="expected 1 to 4 fields, found 5"):
        parameters_of([("inner_lr", "1,2")] * 5, DEMO)
    with pytest.raises(InvalidRun, match=r"expected settings\.inner_lr once"):
        parameters_of([("inner_lr", "1,2"), ("settings.inner_lr", "3,4")], DEMO)


def test_every_combination_is_a_run_and_the_last_field_changes_fastest() -> None:
    parameters = parameters_of([("inner_lr", "1,2"), ("workload.size", "demo,micro")], DEMO)
    assert combinations(parameters) == [
        {"settings.inner_lr": 1.0, "workload.size": "demo"},
        {"settings.inner_lr": 1.0, "workload.size": "micro"},
        {"settings.inner_lr": 2.0, "workload.size": "demo"},
        {"settings.inner_lr": 2.0, "workload.size": "micro"},
    ]


def test_a_run_has_its_values_in_settings_workload_and_name() -> None:
    draft = draft_with(DEMO, {"settings.inner_lr": 1e-3, "workload.size": "micro"})
    assert (draft.settings.inner_lr, draft.workload.size) == (1e-3, "micro")  # type: ignore[union-attr]
    assert draft.name == "Local demo · inner_lr=0.001, size=micro"
    assert draft.pools == DEMO.pools


def test_values_that_do_not_fit_together_are_refused_with_the_combination() -> None:
    with pytest.raises(InvalidRun, match="with num_fragments=1000") as error:
        draft_with(DEMO, {"settings.num_fragments": 1000})
    assert error.value.field == "sweep"


def test_lines() -> None:
    text = "inner_lr = 1, 2\n\n# a comment\n settings.codec=bf16,int8 \n"
    assert parse_lines(text) == [("inner_lr", "1, 2"), ("settings.codec", "bf16,int8")]
    with pytest.raises(InvalidRun, match="line 2: expected field = values, found 'batch_size'"):
        parse_lines("inner_lr = 1\nbatch_size")
    with pytest.raises(InvalidRun, match="at most 4000 characters"):
        parse_lines("x" * (TEXT_LENGTH + 1))


def test_a_parameter_has_the_label_of_its_setting() -> None:
    assert Parameter(field="settings.inner_lr", values=()).label == "Inner learning rate"
    assert Parameter(field="workload.eval_bytes", values=()).label == "Eval bytes"
