"""Runs through the API: lists, the information for clients, logs, rounds, actions and exports."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from diloco.protocol.settings import setting_fields
from runs.models import Run
from runs.queries import list_export
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


def test_pages_list_every_run_once(owner: Any, run: Any) -> None:
    created = {str(run.pk)} | {
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
        seed.run(run.owner, committed=0, replicas=1)  # newer runs do not move the page
    assert len(seen) == len(set(seen))
    assert set(seen) == created


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
        ({"limit": 0}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"before": "x"}, "before"),
        ({"state": "on fire"}, "state.0"),
        ({"name": "a\x00b"}, "name"),
    ],
)
def test_invalid_search_query(owner: Any, query: dict[str, Any], field: str) -> None:
    response = owner.get("/runs", **query)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field


def test_info_is_the_group_document_with_all_settings(owner: Any, run: Any) -> None:
    from runs.reconcile.group_publishing import group_document

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


def test_the_number_of_queries_is_constant(owner: Any, run: Any) -> None:
    def count_queries(path: str, **query: Any) -> int:
        with CaptureQueriesContext(connection) as queries:
            assert owner.get(path, **query).status_code == 200
        return len(queries)

    paths = [
        f"/runs/{run.pk}{rest}"
        for rest in (
            "",
            "/info",
            "/replicas",
            "/replicas/1",
            "/rounds",
            "/events",
            "/logs",
            "/series",
            "/points?series=loss&replica=1",
            "/checkpoints",
        )
    ] + ["/runs", "/backends"]
    owner.get("/me")
    before = [count_queries(path) for path in paths]
    for _ in range(3):
        seed.run(run.owner, committed=2, replicas=3)
    replica = run.replicas.get(number=1)
    for number in range(20):
        run.events.create(at=run.created_at, kind="x", message=str(number), replica=replica)
        run.rounds.create(number=100 + number)
    assert [count_queries(path) for path in paths] == before
    assert max(before) <= 14


def test_logs_and_events_are_paged_by_id(owner: Any, run: Any) -> None:
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


def test_rounds_are_paged_by_number(owner: Any, run: Any) -> None:
    result = owner.get(f"/runs/{run.pk}/rounds", after=1, limit=1).json()
    assert [row["number"] for row in result] == [2]
    assert {c["replica"] for c in result[0]["contributions"]} == {0, 1}

    run.rounds.create(number=1000)  # with a gap before it
    result = owner.get(f"/runs/{run.pk}/rounds", after=4, limit=1).json()
    assert [row["number"] for row in result] == [1000]


def test_a_page_of_rounds_is_limited_by_contributions(
    owner: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rounds of 1,000 replicas in one response would exhaust the memory."""
    monkeypatch.setattr("runs.queries.selectors.RESPONSE_CONTRIBUTIONS", 4)
    seen: list[int] = []
    while part := owner.get(
        f"/runs/{run.pk}/rounds", after=seen[-1] if seen else 0, limit=2000
    ).json():
        assert len(part) <= 2  # with two replicas
        seen += [row["number"] for row in part]
    assert seen == [1, 2, 3, 4]


def test_scale_sets_the_max_price_of_later_launches(owner: Any, run: Any) -> None:
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


def test_actions_on_an_ended_run_are_conflicts(owner: Any, run: Any) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    response = owner.post(f"/runs/{run.pk}/replicas/1/restart")
    assert response.status_code == 409
    assert "cannot become restarting" in response.json()["detail"]
    response = owner.post(f"/runs/{run.pk}/stop")
    assert response.json() == {"changed": False, "state": "succeeded"}
    response = owner.post(f"/runs/{run.pk}/pools/{run.pools.get().pk}/scale", {"count": 3})
    assert response.status_code == 422


@pytest.mark.django_db(transaction=True)
def test_exports_are_streamed(run: Any, token_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ASGI, Django reads a synchronous iterator to its end before it sends the first byte."""
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
        response = await AsyncClient().get(path, headers=headers)
        return [len(read) async for _ in response.streaming_content]

    read_by_then = async_to_sync(go)()
    assert read_by_then[0] == 1
    assert read_by_then == sorted(read_by_then)
    assert len(read_by_then) == run.rounds.count()


def test_exports_have_a_file_name(owner: Any, run: Any) -> None:
    response = owner.get(f"/runs/{run.pk}/export/rounds.csv")
    assert response["Content-Type"] == "text/csv; charset=utf-8"
    assert response["Content-Disposition"] == (
        f'attachment; filename="local-demo-{str(run.pk)[:8]}-rounds.csv"'
    )
    body = b"".join(response.streaming_content)
    assert body.startswith(b"round,fragment,state")
    assert owner.get(f"/runs/{run.pk}/export/secrets.csv").status_code == 422
    assert owner.get(f"/runs/{run.pk}/export/rounds.exe").status_code == 422


def test_export_without_pyarrow(owner: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    response = owner.get(f"/runs/{run.pk}/export/rounds.parquet")
    assert response.status_code == 501
    assert "expected pyarrow on the server" in response.json()["detail"]


def test_the_runs_of_a_query_are_exported_in_its_order(
    owner: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_export, "PAGE", 2)
    for name in ("c", "a", "b", "=1+1"):
        tagged = seed.run(run.owner, name=name, committed=0, replicas=1)
        Run.objects.filter(pk=tagged.pk).update(tags=["x", "y"])
    response = owner.get("/runs/export.csv", q="tag:x", sort="name", columns="name")
    assert response["Content-Disposition"] == 'attachment; filename="runs.csv"'
    text = b"".join(response.streaming_content).decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["name"] for row in rows] == ["'=1+1", "a", "b", "c"]  # no formula
    assert rows[1]["tags"] == "x, y"
    assert rows[1]["backends"] == "local"
    assert json.loads(rows[1]["settings"])["sync_every"] == run.settings.sync_every
    assert list(rows[0]) == list(list_export.COLUMNS)


def test_an_export_of_runs_refuses_a_wrong_query(owner: Any, run: Any) -> None:
    response = owner.get("/runs/export.csv", q="loss<x")
    assert response.status_code == 422
    empty = owner.get("/runs/export.jsonl", q="name-that-no-run-has")
    assert b"".join(empty.streaming_content) == b""


def test_every_column_of_the_export_has_a_valid_value(owner: Any, run: Any) -> None:
    """Values that a column can hold, whatever wrote them."""
    Run.objects.filter(pk=run.pk).update(
        tags={"a": 1}, eval_loss=math.inf, cost_usd=1.0, group_settings=["x"], tokens=2**62
    )
    for format in ("csv", "jsonl"):
        body = b"".join(owner.get(f"/runs/export.{format}").streaming_content)
        assert str(run.pk).encode() in body
