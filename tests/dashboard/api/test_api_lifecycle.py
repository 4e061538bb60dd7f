"""Lifecycle of runs through the API: pause to delete, clones and forks, alerts, and tools."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
from django.utils import timezone

from runs.models import Archive, Checkpoint, Credential, ReplicaAttempt, Run
from tests.browser import seed

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _folder(settings: Any, tmp_path: Any) -> None:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()


def describe(owner: Any, run: Any, body: dict[str, Any]) -> Any:
    return owner.post(f"/runs/{run.pk}/describe", body)


def test_pause_and_conflicting_actions(owner: Any, run: Any) -> None:
    assert owner.post(f"/runs/{run.pk}/pause").json() == {"changed": True, "state": "pausing"}
    assert owner.post(f"/runs/{run.pk}/pause").json() == {"changed": False, "state": "pausing"}
    response = owner.post(f"/runs/{run.pk}/resume")
    assert (response.status_code, response.json()["detail"]) == (
        409,
        "its machines are still being released",
    )
    assert owner.post(f"/runs/{run.pk}/save").status_code == 409


def test_force_stop(owner: Any, run: Any) -> None:
    response = owner.post(f"/runs/{run.pk}/stop", {"force": True}).json()
    assert response == {"changed": True, "state": "stopping"}
    run.refresh_from_db()
    assert run.cancel_at is not None


def test_notes_tags_and_archive(owner: Any, run: Any) -> None:
    assert describe(owner, run, {"tags": ["a", "b"]}).json()["changed"] is True
    assert describe(owner, run, {"notes": "why"}).json()["changed"] is True
    body = owner.get(f"/runs/{run.pk}").json()
    assert (body["notes"], body["tags"], body["archived"]) == ("why", ["a", "b"], False)
    response = describe(owner, run, {"tags": ["two words"]})
    assert response.status_code == 409
    assert "expected tags" in response.json()["detail"]
    assert describe(owner, run, {"archived": True}).status_code == 409
    Run.objects.filter(pk=run.pk).update(state="failed")
    refused = describe(owner, run, {"archived": True, "tags": ["two words"]})
    assert refused.status_code == 409
    assert owner.get(f"/runs/{run.pk}").json()["archived"] is False, "nothing was changed"
    assert describe(owner, run, {"archived": True}).json()["changed"] is True
    assert owner.get("/runs").json()["runs"] == []
    assert len(owner.get("/runs", q="is:archived tag:a").json()["runs"]) == 1
    response = owner.get("/runs", q="loss<")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "q"


def test_delete_requires_the_run_name(owner: Any, run: Any) -> None:
    Run.objects.filter(pk=run.pk).update(state="failed")
    ReplicaAttempt.objects.update(ended_at=timezone.now())
    response = owner.post(f"/runs/{run.pk}/delete", {"name": "other"})
    assert response.status_code == 409
    assert owner.post(f"/runs/{run.pk}/delete", {"name": run.name}).json()["changed"] is True
    run.refresh_from_db()
    assert run.delete_requested_at is not None


def test_the_document_of_a_clone_can_be_submitted(owner: Any, run: Any) -> None:
    credential = Credential.objects.create(
        name="shelf", kind="local", created_at=timezone.now(), changed_at=timezone.now()
    )
    run.pools.update(credential=credential)
    document = owner.get(f"/runs/{run.pk}/document").json()
    assert document["pools"][0]["credential"] == "shelf"
    assert document["settings"] == run.group_settings
    document["rendezvous"] = ""
    response = owner.post("/runs", document)
    assert response.status_code == 201, response.content
    created = Run.objects.get(pk=response.json()["id"])
    assert created.group_settings == run.group_settings
    assert created.pools.get().credential == credential


def test_a_fork_document_has_its_checkpoint(owner: Any, run: Any) -> None:
    path = f"/runs/{run.pk}/document"
    assert owner.get(path, fork="true").status_code == 409
    for number in (0, 2):
        Checkpoint.objects.create(
            run=run, round=number, key="k", size_bytes=1, digest="d", created_at=timezone.now()
        )
    assert owner.get(path, fork="true").json()["fork"] == {
        "run": str(run.pk),
        "round": 2,
        "outer": True,
    }
    document = owner.get(path, fork="true", round=0).json() | {"rendezvous": ""}
    response = owner.post("/runs", document)
    assert response.status_code == 201, response.content
    created = Run.objects.get(pk=response.json()["id"])
    assert (created.forked_from, created.fork_round) == (run.pk, 0)
    response = owner.post("/runs", document | {"fork": {"run": str(run.pk), "round": 77}})
    assert response.status_code == 422
    assert response.json()["errors"][0]["found"] == "round 77"


def test_alerts(owner: Any, run: Any) -> None:
    now = timezone.now()
    alert = run.alerts.create(
        kind="stalled", level="error", message="no commit", first_at=now, opened_at=now
    )
    (row,) = owner.get(f"/runs/{run.pk}/alerts").json()
    assert (row["kind"], row["message"], row["acknowledged_by"]) == ("stalled", "no commit", None)
    path = f"/runs/{run.pk}/alerts/{alert.pk}/acknowledge"
    assert [owner.post(path).json()["changed"] for _ in range(2)] == [True, False]
    assert owner.get(f"/runs/{run.pk}/alerts").json()[0]["acknowledged_by"] == "owner"
    other = seed.run(run.owner, committed=0)
    assert owner.post(f"/runs/{other.pk}/alerts/{alert.pk}/acknowledge").status_code == 404


def test_compare(owner: Any, run: Any) -> None:
    other = seed.run(run.owner, committed=2, sync_every=20)
    result = owner.get("/compare", id=[str(run.pk), str(other.pk)]).json()
    assert [row["id"] for row in result["runs"]] == [str(run.pk), str(other.pk)]
    changed = {d["name"]: d["values"] for d in result["differences"]}
    assert changed["settings.sync_every"] == [40, 20]
    response = owner.get("/compare", id=[str(run.pk), "0" * 8 + str(run.pk)[8:]])
    assert response.status_code == 404
    assert "found 00000000" in response.json()["detail"]


def test_planner(owner: Any) -> None:
    question = {"parameters": 10**9, "step_s": 1.0, "tokens_per_step": 65_536, "tokens": 10**9}
    result = owner.post("/planner", question).json()
    assert result["chosen"]["sync_every"] == 50
    assert len(result["curve"]) > 5
    response = owner.post("/planner", question | {"codec": "zip"})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "codec"


def test_custom_code(owner: Any) -> None:
    def upload(data: bytes) -> Any:
        return owner.client.post(
            "/api/archives", data, content_type="application/zip", headers=owner.headers
        )

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("mine.py", "def make(settings):\n    raise NotImplementedError\n")
        archive.writestr("weights.bin", b"x" * 3_000_000)
    response = upload(packed.getvalue())
    assert response.status_code == 201, response.content
    sha256 = response.json()["sha256"]
    assert Archive.objects.get().pk == sha256
    for data in (b"", b"no zip"):
        assert upload(data).status_code == 422
    document = {
        "name": "Mine",
        "pools": [{}],
        "settings": {"warmup_steps": 5},
        "workload": {"kind": "custom", "function": "mine:make", "archive": sha256},
    }
    response = owner.post("/runs", document)
    assert response.status_code == 201, response.content
    assert Run.objects.get().archive_id == sha256
    document["workload"]["archive"] = "0" * 64
    response = owner.post("/runs", document)
    assert response.json()["errors"][0]["field"] == "workload.archive"
