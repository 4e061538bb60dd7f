"""Runs through the API: lists, documents, what is wrong with them, and what a client is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from diloco.protocol.settings import setting_fields
from runs.models import Run
from tests.browser import seed

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


def test_pages_lose_nothing_and_repeat_nothing(owner: Any, run: Any) -> None:
    made = {str(run.pk)} | {
        str(seed.run(run.owner, committed=0, replicas=1, age_s=age, name=f"run {age}").pk)
        for age in (10, 10, 20, 30, 40)
    }
    seen: list[str] = []
    before = None
    while True:
        page = owner.get("/runs", limit=2, **({"before": before} if before else {})).json()
        seen += [row["id"] for row in page["runs"]]
        before = page["next"]
        if before is None:
            break
        seed.run(run.owner, committed=0, replicas=1)  # newer ones move nothing
    assert len(seen) == len(set(seen))
    assert set(seen) == made


def test_filters(owner: Any, run: Any) -> None:
    seed.run(run.owner, state="failed", committed=0, name="Other")
    seed.run(seed.user("eve", "operator"), state="succeeded", committed=0, name="Third one")

    def names(**query: Any) -> set[str]:
        return {row["name"] for row in owner.get("/runs", **query).json()["runs"]}

    assert names(state="failed") == {"Other"}
    assert names(state=["failed", "succeeded"]) == {"Other", "Third one"}
    assert names(owner="eve") == {"Third one"}
    assert names(name="THIRD") == {"Third one"}
    assert names(backend="modal") == set()
    assert len(names(backend="local")) == 3


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"), ({"limit": "x"}, "limit"), ({"before": "x"}, "before"),
        ({"state": "on fire"}, "state.0"), ({"name": "a\x00b"}, "name"),
    ],
)  # fmt: skip
def test_a_query_that_is_wrong(owner: Any, query: dict[str, Any], field: str) -> None:
    answer = owner.get("/runs", **query)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field


def test_submit_as_json_and_as_toml(owner: Any) -> None:
    answer = owner.post("/runs", DOCUMENT)
    assert answer.status_code == 201, answer.content
    made = Run.objects.get(pk=answer.json()["id"])
    assert answer["Location"] == f"/api/runs/{made.pk}"
    assert made.owner.username == "owner"
    assert made.group_settings["num_replicas"] == 3
    assert made.group_settings["sync_every"] == 10
    second = made.pools.order_by("id")[1]
    assert (second.timeout_s, second.price_usd_h) == (600, 0.5)
    toml = (
        'name = "Sent"\n[settings]\nwarmup_steps = 5\n'
        '[workload]\nkind = "byte_gpt"\nsize = "micro"\n[[pools]]\ncount = 2\n'
    )
    answer = owner.client.post(
        "/api/runs", toml, content_type="application/toml", headers=owner.headers
    )
    assert answer.status_code == 201, answer.content
    assert answer.json()["workload"]["size"] == "micro"


def test_the_form_s_effective_json_is_a_document(owner: Any) -> None:
    from dashboard.presentation.estimate import estimate
    from runs.submit.run_draft import local_demo

    answer = owner.post("/runs", json.loads(estimate(local_demo()).effective_json))
    assert answer.status_code == 201, answer.content
    made = Run.objects.get(pk=answer.json()["id"])
    assert made.group_settings == local_demo().settings.to_dict()


def test_one_key_one_run(owner: Any, program: Any, token_of: Any) -> None:
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
def test_one_key_with_another_document_is_refused(owner: Any, change: dict[str, Any]) -> None:
    assert owner.post("/runs", DOCUMENT, **{"Idempotency-Key": "k"}).status_code == 201
    again = owner.post("/runs", DOCUMENT | change, **{"Idempotency-Key": "k"})
    assert again.status_code == 422
    problem = again.json()["errors"][0]
    assert problem["field"] == "submit_key"
    assert f"another {next(iter(change))}" in problem["message"]
    assert Run.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"settings": {"sync_every": 0}},
         {"field": "settings.sync_every", "expected": "1 or more", "found": "0"}),
        ({"settings": {"codec": "zip"}},
         {"field": "settings.codec", "expected": "one of fp32, bf16, int8, e3m0, topk",
          "found": "'zip'"}),
        ({"settings": {"num_replicas": 9, "max_replicas": 9}},
         {"field": "pools", "expected": "pools that add up to the target of 9 replicas",
          "found": "3"}),
        ({"settings": {"colour": 1}},
         {"field": "settings.colour", "message": "is not a group setting this version knows"}),
        ({"pools": [{"count": 1.5}]},
         {"field": "pools.0.count", "expected": "a whole number", "found": "1.5"}),
        ({"pools": [{"hardware": "H900"}]}, {"field": "pools.0.hardware", "found": "'H900'"}),
        ({"pools": [{}, {"credential": "gone"}]},
         {"field": "pools.1.credential", "expected": "a credential for local (none yet)",
          "found": "'gone'"}),
        ({"store_credential": "gone"}, {"field": "store_credential", "found": "'gone'"}),
        ({"name": ""}, {"field": "name", "expected": "at least 1 characters", "found": "''"}),
        ({"nonsense": 1}, {"field": "nonsense", "expected": "no such field", "found": "1"}),
        ({"workload": {"size": []}}, {"field": "workload"}),
        ({"workload": {"kind": {}}}, {"field": "workload.kind"}),
        ({"workload": {"data": 3}}, {"field": "workload.data"}),
        ({"rendezvous": "here/there"},
         {"field": "rendezvous", "expected": "a URI or an absolute path", "found": "'here/there'"}),
        ({"budget_usd": -1}, {"field": "budget_usd", "expected": "0 or more"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/runs", "/plan"])
def test_what_is_wrong_is_told_at_its_field(
    owner: Any, path: str, change: dict[str, Any], problem: dict[str, str]
) -> None:
    answer = owner.post(path, DOCUMENT | change)
    if answer.status_code == 200:
        found = answer.json()["problems"]
    else:
        assert answer.status_code == 422, answer.content
        found = answer.json()["errors"]
    told = found[0]
    assert {name: told[name] for name in problem} | {"field": told["field"]} == problem
    assert not Run.objects.exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "Expecting property name"), (b"[]", "expected an object, found list"),
        (b"\xff", "can't decode"), (b"[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_documents(owner: Any, body: bytes, why: str) -> None:
    answer = owner.client.post(
        "/api/runs", body, content_type="application/json", headers=owner.headers
    )
    assert answer.status_code == 400
    assert why in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "expected finite numbers, found NaN"),
        (b'{"a": 1e999}', "expected finite numbers, found inf"),
        (b'{"a": 10' + b"0" * 30 + b"}", "expected whole numbers up to 2^53"),
        (b'{"a": "\\u0000"}', "without NUL"), (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"), (b'{"a": ' * 25 + b"1" + b"}" * 25, "20 levels"),
        (b"null", "expected"),
    ],
)  # fmt: skip
def test_values_that_nobody_takes(owner: Any, body: bytes, why: str) -> None:
    answer = owner.client.post(
        "/api/runs", body, content_type="application/json", headers=owner.headers
    )
    assert answer.status_code == 422
    assert why in answer.json()["detail"]


def test_null_is_no_body(owner: Any, run: Any) -> None:
    answer = owner.client.post(
        f"/api/runs/{run.pk}/stop", b"null", content_type="application/json", headers=owner.headers
    )
    assert answer.json()["changed"] is True


def test_a_body_that_is_too_large(owner: Any) -> None:
    body = json.dumps(DOCUMENT | {"name": "x" * 3_000_000})
    answer = owner.client.post(
        "/api/runs", body, content_type="application/json", headers=owner.headers
    )
    assert answer.status_code == 413
    assert "exceeded" in answer.json()["detail"]


def test_what_the_preflight_finds_is_told_as_the_form_tells_it(owner: Any, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    change = {"rendezvous": f"{tmp_path}/file/run"}
    answer = owner.post("/runs", DOCUMENT | change)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "rendezvous"
    answer = owner.post("/plan", DOCUMENT | change)
    assert answer.status_code == 200
    assert answer.json()["problems"][0]["field"] == "rendezvous"
    assert answer.json()["estimate"]["replicas"] == 3
    answer = owner.post("/plan?ask=false", DOCUMENT | change)
    assert answer.json()["problems"] == []
    assert not Run.objects.exists()


def test_a_dry_run_creates_nothing(owner: Any, settings: Any, tmp_path: Any) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "allowed")]
    outside = {"rendezvous": str(tmp_path / "outside" / "run")}
    for path in ("/plan", "/plan?ask=false", "/runs"):
        answer = owner.post(path, DOCUMENT | outside)
        [problem] = answer.json()["problems" if path.startswith("/plan") else "errors"]
        assert problem["field"] == "rendezvous"
        assert str(tmp_path / "allowed") in problem["expected"]
    inside = {"rendezvous": str(tmp_path / "allowed" / "new" / "run")}
    for change in ({}, inside):
        assert owner.post("/plan", DOCUMENT | change).json()["problems"] == []
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_writes_nothing_beside_what_is_there(owner: Any, tmp_path: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    change = {"rendezvous": str(tmp_path / "mine")}
    [problem] = owner.post("/plan", DOCUMENT | change).json()["problems"]
    assert (problem["field"], "notes.txt" in problem["found"]) == ("rendezvous", True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_prefix_inside_another_run_s_is_refused_by_name(owner: Any, tmp_path: Any) -> None:
    first = {"rendezvous": str(tmp_path / "mine")}
    assert owner.post("/runs", DOCUMENT | first | {"name": "First here"}).status_code == 201
    for spelling in ("mine", "mine/rounds", "mine//x", "x/../mine", "../" + tmp_path.name):
        answer = owner.post("/runs", DOCUMENT | {"rendezvous": f"{tmp_path}/{spelling}"})
        assert answer.status_code == 422, spelling
        [problem] = answer.json()["errors"]
        assert (problem["field"], "'First here'" in problem["found"]) == ("rendezvous", True)


def test_info_is_the_group_s_document_with_every_setting(owner: Any, run: Any) -> None:
    from runs.reconcile.launch import group_document

    Run.objects.filter(pk=run.pk).update(group_fingerprint="", code_sha256="")
    body = owner.get(f"/runs/{run.pk}/info").json()
    assert body["settings_authority"] == "server"
    assert (body["model_hash"], body["code"], body["fingerprint"]) == ("pending",) * 3
    expected = body["expected_client_settings"]
    names = {spec.name for spec in setting_fields()} | {"bf16_comm", "heartbeat_timeout"}
    assert set(expected) == names
    assert None not in expected.values()
    assert (expected["sync_every"], expected["bf16_comm"]) == (40, False)
    assert expected["heartbeat_timeout"] == body["settings"]["heartbeat_timeout_s"]
    run.refresh_from_db()
    run.code_sha256 = "c" * 64
    run.group_fingerprint = group_document(run, run.code_sha256).fingerprint
    run.group_settings["codec"] = "bf16"
    run.model_hash = "m" * 64
    run.save()
    body = owner.get(f"/runs/{run.pk}/info").json()
    document = json.loads(group_document(run, run.code_sha256).to_bytes())
    assert {name: body[name] for name in document} == document
    assert body["model_hash"] == "m" * 64
    assert body["expected_client_settings"]["bf16_comm"] is True


def test_constant_queries(owner: Any, run: Any) -> None:
    def asked(path: str, **query: Any) -> int:
        with CaptureQueriesContext(connection) as queries:
            assert owner.get(path, **query).status_code == 200
        return len(queries)

    paths = [f"/runs/{run.pk}{rest}" for rest in (
        "", "/info", "/replicas", "/replicas/1", "/rounds", "/events", "/logs", "/series",
        "/points?series=loss&replica=1", "/checkpoints",
    )] + ["/runs", "/backends"]  # fmt: skip
    owner.get("/me")
    before = [asked(path) for path in paths]
    for _ in range(3):
        seed.run(run.owner, committed=2, replicas=3)
    replica = run.replicas.get(number=1)
    for number in range(20):
        run.events.create(at=run.created_at, kind="x", message=str(number), replica=replica)
        run.rounds.create(number=100 + number)
    assert [asked(path) for path in paths] == before
    assert max(before) <= 14


def test_lines_and_events_go_on_after_a_cursor(owner: Any, run: Any) -> None:
    for path in ("logs", "events"):
        whole = owner.get(f"/runs/{run.pk}/{path}", limit=1000).json()
        assert [row["id"] for row in whole] == sorted(row["id"] for row in whole)
        seen, after = [], 0
        while part := owner.get(f"/runs/{run.pk}/{path}", after=after, limit=2).json():
            seen += part
            after = part[-1]["id"]
        assert seen == whole
    newest = owner.get(f"/runs/{run.pk}/logs", limit=2).json()
    assert newest == owner.get(f"/runs/{run.pk}/logs", limit=1000).json()[-2:]
    assert owner.get(f"/runs/{run.pk}/logs", text="data SHARDS", replica=0).json()
    assert owner.get(f"/runs/{run.pk}/logs", level="error").json() == []


def test_rounds_go_on_after_a_number(owner: Any, run: Any) -> None:
    found = owner.get(f"/runs/{run.pk}/rounds", after=1, limit=1).json()
    assert [row["number"] for row in found] == [2]
    assert {c["replica"] for c in found[0]["contributions"]} == {0, 1}

    run.rounds.create(number=1000)  # whatever lies between
    found = owner.get(f"/runs/{run.pk}/rounds", after=4, limit=1).json()
    assert [row["number"] for row in found] == [1000]


def test_rounds_are_as_many_as_their_contributions_allow(
    owner: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rounds of 1,000 replicas, in one answer, would be all memory there is."""
    monkeypatch.setattr("runs.queries.selectors.SNAPSHOT_CONTRIBUTIONS", 4)
    seen: list[int] = []
    while part := owner.get(
        f"/runs/{run.pk}/rounds", after=seen[-1] if seen else 0, limit=2000
    ).json():
        assert len(part) <= 2  # of two replicas
        seen += [row["number"] for row in part]
    assert seen == [1, 2, 3, 4]


def test_scale_takes_a_max_price_for_the_launches_to_come(owner: Any, run: Any) -> None:
    pool = run.pools.first()
    address = f"/runs/{run.pk}/pools/{pool.pk}/scale"
    for body, limit in (
        ({"count": pool.count, "max_price_usd_h": 2.5}, 2.5),
        ({"count": pool.count}, 2.5),
        ({"count": pool.count, "max_price_usd_h": None}, None),
    ):
        assert owner.post(address, body).status_code == 200
        pool.refresh_from_db()
        assert pool.max_price_usd_h == limit
    assert owner.post(address, {"count": 1, "max_price_usd_h": -1}).status_code == 422


def test_too_late_is_a_conflict(owner: Any, run: Any) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    answer = owner.post(f"/runs/{run.pk}/replicas/1/restart")
    assert answer.status_code == 409
    assert "cannot become restarting" in answer.json()["detail"]
    answer = owner.post(f"/runs/{run.pk}/stop")
    assert answer.json() == {"changed": False, "state": "succeeded"}
    answer = owner.post(f"/runs/{run.pk}/pools/{run.pools.get().pk}/scale", {"count": 3})
    assert answer.status_code == 422


@pytest.mark.django_db(transaction=True)
def test_an_export_is_sent_while_it_is_read(
    run: Any, token_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ASGI Django would read a synchronous iterator to its end before it sends any of it."""
    from asgiref.sync import async_to_sync
    from django.test import AsyncClient

    from runs.queries import exports

    monkeypatch.setattr(exports, "ROWS", 1)
    read: list[int] = []
    table = exports.TABLES["rounds"]

    def chunks(of: Any) -> Any:
        for chunk in table.chunks(of):
            read.append(1)
            yield chunk

    slow = exports.Table(columns=table.columns, chunks=chunks)
    monkeypatch.setitem(exports.TABLES, "rounds", slow)
    headers = {"Authorization": f"Bearer {token_of('owner', 'operator')}"}

    async def go() -> list[int]:
        path = f"/api/runs/{run.pk}/export/rounds.jsonl"
        answer = await AsyncClient().get(path, headers=headers)
        return [len(read) async for _ in answer.streaming_content]

    read_by_then = async_to_sync(go)()
    assert read_by_then[0] == 1
    assert read_by_then == sorted(read_by_then)
    assert len(read_by_then) == run.rounds.count()


def test_export_names_its_file(owner: Any, run: Any) -> None:
    answer = owner.get(f"/runs/{run.pk}/export/rounds.csv")
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    assert answer["Content-Disposition"] == (
        f'attachment; filename="local-demo-{str(run.pk)[:8]}-rounds.csv"'
    )
    body = b"".join(answer.streaming_content)
    assert body.startswith(b"round,fragment,state")
    assert owner.get(f"/runs/{run.pk}/export/secrets.csv").status_code == 422
    assert owner.get(f"/runs/{run.pk}/export/rounds.exe").status_code == 422


def test_export_without_pyarrow(owner: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    answer = owner.get(f"/runs/{run.pk}/export/rounds.parquet")
    assert answer.status_code == 501
    assert "expected pyarrow on the server" in answer.json()["detail"]
