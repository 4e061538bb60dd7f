"""Documents through the API: submit, plan, their errors, and the preflight."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco.protocol.payload_size import CODEC_SHAPES
from runs.models import Run, Sweep

pytestmark = pytest.mark.django_db
DOCUMENT: dict[str, Any] = {
    "name": "Sent",
    "settings": {"warmup_steps": 5, "sync_every": 10},
    "pools": [{"count": 2}, {"count": 1, "timeout_s": 600, "price_usd_h": 0.5}],
    "budget_usd": 3.5,
    "time_limit_s": 60,
    "over_budget": True,
}


@pytest.fixture(autouse=True)
def _folder(settings: Any, tmp_path: Any) -> None:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()


def test_submit_as_json_and_as_toml(owner: Any) -> None:
    response = owner.post("/runs", DOCUMENT)
    assert response.status_code == 201, response.content
    created = Run.objects.get(pk=response.json()["id"])
    assert response["Location"] == f"/api/runs/{created.pk}"
    assert created.owner.username == "owner"
    assert created.group_settings["num_replicas"] == 3
    assert created.group_settings["sync_every"] == 10
    second = created.pools.order_by("id")[1]
    assert (second.timeout_s, second.price_usd_h) == (600, 0.5)
    toml = (
        'name = "Sent"\n[settings]\nwarmup_steps = 5\n'
        '[workload]\nkind = "byte_gpt"\nsize = "micro"\n[[pools]]\ncount = 2\n'
    )
    response = owner.client.post(
        "/api/runs", toml, content_type="application/toml", headers=owner.headers
    )
    assert response.status_code == 201, response.content
    assert response.json()["workload"]["size"] == "micro"


def test_the_preview_of_the_form_is_a_valid_document(owner: Any) -> None:
    from dashboard.presentation.estimate import estimate
    from runs.submit.run_draft import local_demo

    response = owner.post("/runs", json.loads(estimate(local_demo()).effective_json))
    assert response.status_code == 201, response.content
    created = Run.objects.get(pk=response.json()["id"])
    assert created.group_settings == local_demo().settings.to_dict()


def test_an_idempotency_key_creates_one_run(owner: Any, program: Any, token_of: Any) -> None:
    first = owner.post("/runs", DOCUMENT, **{"Idempotency-Key": "k"})
    again = owner.post("/runs", DOCUMENT, **{"Idempotency-Key": "k"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = program(token_of("eve", "operator")).post("/runs", DOCUMENT, **{"Idempotency-Key": "k"})
    assert other.status_code == 422
    assert other.json()["errors"][0]["field"] == "submit_key"
    assert owner.post("/runs", DOCUMENT, **{"Idempotency-Key": "x" * 65}).status_code == 422
    assert Run.objects.count() == 1


@pytest.mark.parametrize("change", [{"name": "another"}, {"budget_usd": 7.0}, {"max_restarts": 9}])
def test_an_idempotency_key_with_another_document_is_rejected(
    owner: Any, change: dict[str, Any]
) -> None:
    assert owner.post("/runs", DOCUMENT, **{"Idempotency-Key": "k"}).status_code == 201
    again = owner.post("/runs", DOCUMENT | change, **{"Idempotency-Key": "k"})
    assert again.status_code == 422
    problem = again.json()["errors"][0]
    assert problem["field"] == "submit_key"
    assert f"another {next(iter(change))}" in problem["message"]
    assert Run.objects.count() == 1


def test_an_idempotency_key_creates_one_sweep(owner: Any) -> None:
    parameters = [{"field": "inner_lr", "values": [1e-3, 1e-4]}]
    sweep = {"run": DOCUMENT, "parameters": parameters}
    key = {"Idempotency-Key": "k"}
    first, again = owner.post("/sweeps", sweep, **key), owner.post("/sweeps", sweep, **key)
    assert (first.status_code, again.status_code) == (201, 200), first.content
    assert first.json()["sweep"]["id"] == again.json()["sweep"]["id"]
    for change, field in (
        ({"parallel": 1}, "parallel"),
        ({"parameters": [{"field": "inner_lr", "values": [1e-3, 1e-5]}]}, "parameters"),
        ({"run": DOCUMENT | {"max_restarts": 9}}, "run.max_restarts"),
    ):
        other = owner.post("/sweeps", sweep | change, **key)
        assert other.status_code == 422
        assert f"another {field}. Use a new key" in other.json()["detail"]
    assert (Sweep.objects.count(), Run.objects.count()) == (1, 2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"settings": {"sync_every": 0}},
            {"field": "settings.sync_every", "expected": "1 or more", "found": "0"},
        ),
        (
            {"settings": {"codec": "zip"}},
            {
                "field": "settings.codec",
                "expected": f"one of {', '.join(CODEC_SHAPES)}",
                "found": "'zip'",
            },
        ),
        (
            {"settings": {"num_replicas": 9, "max_replicas": 9}},
            {
                "field": "pools",
                "expected": "pools that add up to the target of 9 replicas",
                "found": "3",
            },
        ),
        (
            {"settings": {"mean_codec": "int8", "reduce_plan": "gather"}},
            {
                "field": "settings.mean_codec",
                "expected": "full, because the reduce plan gather stores no mean, or another "
                "reduce plan",
                "found": "int8",
            },
        ),
        (
            {"settings": {"colour": 1}},
            {"field": "settings.colour", "message": "is not a group setting of this version"},
        ),
        (
            {"pools": [{"count": 1.5}]},
            {"field": "pools.0.count", "expected": "a whole number", "found": "1.5"},
        ),
        ({"pools": [{"hardware": "H900"}]}, {"field": "pools.0.hardware", "found": "'H900'"}),
        (
            {"pools": [{}, {"credential": "gone"}]},
            {
                "field": "pools.1.credential",
                "expected": "a credential for local (none yet)",
                "found": "'gone'",
            },
        ),
        ({"store_credential": "gone"}, {"field": "store_credential", "found": "'gone'"}),
        ({"name": ""}, {"field": "name", "expected": "at least 1 characters", "found": "''"}),
        ({"nonsense": 1}, {"field": "nonsense", "expected": "no such field", "found": "1"}),
        ({"workload": {"size": []}}, {"field": "workload"}),
        ({"workload": {"kind": {}}}, {"field": "workload.kind"}),
        ({"workload": {"data": 3}}, {"field": "workload.data"}),
        (
            {"rendezvous": "here/there"},
            {
                "field": "rendezvous",
                "expected": "a URI or an absolute path",
                "found": "'here/there'",
            },
        ),
        ({"budget_usd": -1}, {"field": "budget_usd", "expected": "0 or more"}),
    ],
)
@pytest.mark.parametrize("path", ["/runs", "/plan"])
def test_errors_name_their_field(
    owner: Any, path: str, change: dict[str, Any], problem: dict[str, str]
) -> None:
    response = owner.post(path, DOCUMENT | change)
    if response.status_code == 200:
        result = response.json()["problems"]
    else:
        assert response.status_code == 422, response.content
        result = response.json()["errors"]
    reported = result[0]
    assert {name: reported[name] for name in problem} | {"field": reported["field"]} == problem
    assert not Run.objects.exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "Expecting property name"),
        (b"[]", "expected an object, found list"),
        (b"\xff", "can't decode"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bodies_that_cannot_be_parsed(owner: Any, body: bytes, why: str) -> None:
    response = owner.client.post(
        "/api/runs", body, content_type="application/json", headers=owner.headers
    )
    assert response.status_code == 400
    assert why in response.json()["detail"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "expected finite numbers, found NaN"),
        (b'{"a": 1e999}', "expected finite numbers, found inf"),
        (b'{"a": 10' + b"0" * 30 + b"}", "expected whole numbers up to 2^53"),
        (b'{"a": "\\u0000"}', "without NUL"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'{"a": ' * 25 + b"1" + b"}" * 25, "20 levels"),
        (b"null", "expected"),
    ],
)
def test_unsupported_values_are_rejected(owner: Any, body: bytes, why: str) -> None:
    response = owner.client.post(
        "/api/runs", body, content_type="application/json", headers=owner.headers
    )
    assert response.status_code == 422
    assert why in response.json()["detail"]


def test_a_null_body_counts_as_missing(owner: Any, run: Any) -> None:
    response = owner.client.post(
        f"/api/runs/{run.pk}/stop", b"null", content_type="application/json", headers=owner.headers
    )
    assert response.json()["changed"] is True


def test_a_body_that_is_too_large(owner: Any) -> None:
    body = json.dumps(DOCUMENT | {"name": "x" * 3_000_000})
    response = owner.client.post(
        "/api/runs", body, content_type="application/json", headers=owner.headers
    )
    assert response.status_code == 413
    assert "exceeded" in response.json()["detail"]


def test_preflight_errors_are_the_same_as_in_the_form(owner: Any, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    change = {"rendezvous": f"{tmp_path}/file/run"}
    response = owner.post("/runs", DOCUMENT | change)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "rendezvous"
    response = owner.post("/plan", DOCUMENT | change)
    assert response.status_code == 200
    assert response.json()["problems"][0]["field"] == "rendezvous"
    assert response.json()["estimate"]["replicas"] == 3
    response = owner.post("/plan?ask=false", DOCUMENT | change)
    assert response.json()["problems"] == []
    assert not Run.objects.exists()


def test_a_dry_run_creates_nothing(owner: Any, settings: Any, tmp_path: Any) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "allowed")]
    outside = {"rendezvous": str(tmp_path / "outside" / "run")}
    for path in ("/plan", "/plan?ask=false", "/runs"):
        response = owner.post(path, DOCUMENT | outside)
        [problem] = response.json()["problems" if path.startswith("/plan") else "errors"]
        assert problem["field"] == "rendezvous"
        assert str(tmp_path / "allowed") in problem["expected"]
    inside = {"rendezvous": str(tmp_path / "allowed" / "new" / "run")}
    for change in ({}, inside):
        assert owner.post("/plan", DOCUMENT | change).json()["problems"] == []
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_writes_nothing_to_the_rendezvous(owner: Any, tmp_path: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    change = {"rendezvous": str(tmp_path / "mine")}
    [problem] = owner.post("/plan", DOCUMENT | change).json()["problems"]
    assert (problem["field"], "notes.txt" in problem["found"]) == ("rendezvous", True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_prefix_inside_that_of_another_run_is_rejected(owner: Any, tmp_path: Any) -> None:
    first = {"rendezvous": str(tmp_path / "mine")}
    assert owner.post("/runs", DOCUMENT | first | {"name": "First here"}).status_code == 201
    for spelling in ("mine", "mine/rounds", "mine//x", "x/../mine", "../" + tmp_path.name):
        response = owner.post("/runs", DOCUMENT | {"rendezvous": f"{tmp_path}/{spelling}"})
        assert response.status_code == 422, spelling
        [problem] = response.json()["errors"]
        assert (problem["field"], "'First here'" in problem["found"]) == ("rendezvous", True)
