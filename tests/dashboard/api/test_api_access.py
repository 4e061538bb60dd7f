"""Access to every operation, by role, with every kind of token and with a session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dashboard.api import api
from runs.actions import boards, run_views, saved_views
from runs.models import Run, Sweep
from runs.queries.panel_layout import PanelLayout
from tests.browser import seed, seed_evaluations
from tests.dashboard.api.conftest import run_with_attempts
from tests.dashboard.page_harness import KINDS, client_for
from tests.matrix import matrix
from tests.module_rows import Unblock

pytestmark = pytest.mark.django_db

Call = Callable[..., Any]

UNKNOWN, REFUSED, OK, MADE, LATE, UNFIT = 401, 403, 200, 201, 409, 422
RUN = "/runs/{run}"
CALLS = {
    # (method, path): status for anonymous, viewer, owner, stranger and admin
    ("get", "/me"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/backends"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/settings"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/runs"): (UNKNOWN, OK, OK, OK, OK),
    ("post", "/runs"): (UNKNOWN, REFUSED, MADE, MADE, MADE),
    ("post", "/plan"): (UNKNOWN, REFUSED, OK, OK, OK),
    ("get", RUN): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/info"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/replicas"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/replicas/1"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/replicas/1/attempts/1/log"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/rounds"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/events"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/logs"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/series"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/points?series=loss&replica=0"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/checkpoints"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/runs/export.csv"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/export/rounds.csv"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/trackers"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/mirrors"): (UNKNOWN, OK, OK, OK, OK),
    ("post", f"{RUN}/mirrors"): (UNKNOWN, REFUSED, LATE, REFUSED, LATE),
    ("post", f"{RUN}/mirrors/stop"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("get", f"{RUN}/evaluations"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/evaluations/{{evaluation}}/attempts"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/evaluation-plans"): (UNKNOWN, OK, OK, OK, OK),
    ("post", f"{RUN}/evaluation-plans"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/evaluation-plans/remove"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/evaluate"): (UNKNOWN, REFUSED, LATE, REFUSED, LATE),
    ("post", f"{RUN}/evaluate/cancel"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/stop"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", "/runs/bulk"): (UNKNOWN, REFUSED, OK, OK, OK),
    ("post", f"{RUN}/replicas/1/stop"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/replicas/1/restart"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/pools"): (UNKNOWN, REFUSED, MADE, REFUSED, MADE),
    ("post", f"{RUN}/pools/{{pool}}/scale"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/pause"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/resume"): (UNKNOWN, REFUSED, LATE, REFUSED, LATE),
    ("post", f"{RUN}/save"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/describe"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", f"{RUN}/delete"): (UNKNOWN, REFUSED, LATE, REFUSED, LATE),
    ("get", f"{RUN}/deletion"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("get", f"{RUN}/document"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/alerts"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/findings"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/alerts"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/search?q=run"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/budgets"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/prices"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/backends/state"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/activity"): (UNKNOWN, OK, OK, OK, OK),
    ("get", f"{RUN}/logs.txt"): (UNKNOWN, OK, OK, OK, OK),
    ("post", f"{RUN}/alerts/{{alert}}/acknowledge"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("get", "/compare?id={run}"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/compare/curves?id={run}"): (UNKNOWN, OK, OK, OK, OK),
    ("post", "/planner"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/fleet"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/spend"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/spend.csv"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/views"): (UNKNOWN, OK, OK, OK, OK),
    ("post", "/views"): (UNKNOWN, MADE, MADE, MADE, MADE),
    ("put", "/views/{view}"): (UNKNOWN, REFUSED, OK, REFUSED, REFUSED),
    ("delete", "/views/{view}"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("get", "/run-views"): (UNKNOWN, OK, OK, OK, OK),
    ("post", "/run-views"): (UNKNOWN, MADE, MADE, MADE, MADE),
    ("put", "/run-views/{run_view}"): (UNKNOWN, REFUSED, OK, REFUSED, REFUSED),
    ("delete", "/run-views/{run_view}"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("get", "/runs/groups?by=tag"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/runs/complete?q=own"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/boards"): (UNKNOWN, OK, OK, OK, OK),
    ("post", "/boards"): (UNKNOWN, MADE, MADE, MADE, MADE),
    ("get", "/boards/{board}"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/boards/{board}/curves"): (UNKNOWN, OK, OK, OK, OK),
    ("put", "/boards/{board}"): (UNKNOWN, REFUSED, OK, REFUSED, REFUSED),
    ("delete", "/boards/{board}"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", "/sweeps"): (UNKNOWN, REFUSED, MADE, MADE, MADE),
    ("post", "/sweeps/plan"): (UNKNOWN, REFUSED, OK, OK, OK),
    ("get", "/sweeps"): (UNKNOWN, OK, OK, OK, OK),
    ("get", "/sweeps/{sweep}"): (UNKNOWN, OK, OK, OK, OK),
    ("post", "/sweeps/{sweep}/stop"): (UNKNOWN, REFUSED, OK, REFUSED, OK),
    ("post", "/archives"): (UNKNOWN, REFUSED, UNFIT, UNFIT, UNFIT),
}
OF_ADMINISTRATORS = {
    ("post", "/backends/reset"),
    ("post", "/budgets"),
    ("put", "/budgets/{budget_id}"),
    ("delete", "/budgets/{budget_id}"),
    ("get", "/credentials"),
    ("post", "/credentials"),
    ("put", "/credentials/{credential_id}"),
    ("delete", "/credentials/{credential_id}"),
    ("post", "/credentials/{credential_id}/test"),
    ("put", "/prices/hardware/{backend}/{hardware}"),
    ("put", "/prices/traffic/{scheme}"),
    ("delete", "/prices/traffic/{scheme}"),
    ("get", "/users"),
    ("post", "/users"),
    ("patch", "/users/{name}"),
    ("post", "/users/{name}/reset"),
    ("get", "/webhooks"),
    ("post", "/webhooks"),
    ("put", "/webhooks/{webhook_id}"),
    ("delete", "/webhooks/{webhook_id}"),
    ("get", "/webhooks/{webhook_id}/deliveries"),
    ("post", "/webhooks/{webhook_id}/test"),
    ("post", "/webhooks/deliveries/{delivery_id}/repeat"),
}
"""Settings of the server: the role admin, and for a token the scope admin."""
OF_ONESELF = {
    ("post", "/alerts/read"),
    ("get", "/tokens"),
    ("post", "/tokens"),
    ("delete", "/tokens/{token_id}"),
}
"""They concern only the caller: test_api_settings.py."""
LOOKS = {("post", "/planner")}
"""Operations that change nothing, so the scope to read is enough."""
OPERATES = {("get", f"{RUN}/deletion")}
"""It changes nothing, but lists objects in the bucket that do not belong to the run."""
RUN_DOCUMENT = {"name": "sent", "pools": [{"count": 2}], "settings": {"warmup_steps": 5}}
SWEEP = {"run": RUN_DOCUMENT, "parameters": [{"field": "inner_lr", "values": [1e-3, 1e-4]}]}
SENT: dict[str, Any] = {
    "/runs": RUN_DOCUMENT,
    "/plan": RUN_DOCUMENT,
    f"{RUN}/pools": {"count": 1},
    f"{RUN}/mirrors": {"tracker": "none"},
    f"{RUN}/mirrors/stop": {"tracker": "none"},
    f"{RUN}/evaluation-plans": {"name": "other"},
    f"{RUN}/evaluation-plans/remove": {"name": "none"},
    f"{RUN}/evaluate": {"name": "val"},
    f"{RUN}/evaluate/cancel": {"name": "val", "round": 2},
    f"{RUN}/pools/{{pool}}/scale": {"count": 2},
    f"{RUN}/describe": {"notes": "looked at"},
    "/runs/bulk": {"action": "tag", "query": "", "count": 1, "tags": ["seen"]},
    f"{RUN}/delete": {"name": "Local demo"},
    "/views": {"name": "mine", "query": "state:failed", "columns": ["name", "loss"]},
    "/views/{view}": {"name": "shared", "query": "loss<8", "shared": True},
    "/run-views": {"name": "mine", "panels": "loss.l,-cosine"},
    "/run-views/{run_view}": {"name": "shared", "x": "tokens", "shared": True},
    "/boards": {"name": "mine", "query": "state:failed"},
    "/boards/{board}": {"name": "shared", "query": "loss<8", "shared": True},
    "/sweeps": SWEEP,
    "/sweeps/plan": SWEEP,
    "/planner": {"parameters": 1000, "step_s": 1.0, "tokens_per_step": 10, "tokens": 100_000},
}
ROLES = {"viewer": "viewer", "owner": "operator", "stranger": "operator", "admin": "admin"}
IDS = [" ".join(call) for call in CALLS]


@pytest.fixture(autouse=True)
def _no_remote_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the calls to backends and buckets; the tests of the preflight cover them."""
    monkeypatch.setattr(
        "runs.submit.preflight.check_runs", lambda drafts, **_: [[] for _ in drafts]
    )
    monkeypatch.setattr("runs.submit.preflight.check_new_pool", lambda *_: [])


@pytest.fixture(scope="module")
def seeded(module_rows: Unblock) -> tuple[Run, dict[str, Any]]:
    """The run, and the ids in the paths of :data:`CALLS`."""
    with module_rows():
        run = run_with_attempts()
        for name, role in ROLES.items():
            seed.user(name, role)
        now = run.created_at
        alert = run.alerts.create(kind="stalled", level="error", first_at=now, opened_at=now)
        sweep = Sweep.objects.create(
            owner=run.owner, submit_key="s", parameters=[], metric="eval_loss", created_at=now
        )
        return run, {
            "run": run.pk,
            "pool": run.pools.get().pk,
            "alert": alert.pk,
            "sweep": sweep.pk,
            "view": saved_views.save(run.owner, name="shared", shared=True).pk,
            "run_view": run_views.save(run.owner, PanelLayout(), name="shared", shared=True).pk,
            "board": boards.save(run.owner, name="shared", query="loss<9", shared=True).pk,
        }


@pytest.fixture
def run(db: None, seeded: tuple[Run, dict[str, Any]]) -> Run:
    return copy.deepcopy(seeded[0])


@pytest.fixture
def call(run: Run, seeded: tuple[Run, dict[str, Any]]) -> Call:
    """Sends what the table has for the operation."""

    def send(client: Client, method: str, path: str, **headers: str) -> Any:
        evaluation = evaluation_of(run) if "/evalua" in path else 0
        address = "/api" + path.format(**seeded[1], evaluation=evaluation)
        if method == "get":
            return client.get(address, headers=headers)
        if method == "delete":
            return client.delete(address, headers=headers)
        body = SENT.get(path, {})
        write = client.put if method == "put" else client.post
        return write(address, body, content_type="application/json", headers=headers)

    return send


def test_every_operation_is_in_the_table() -> None:
    schema = api.get_openapi_schema()
    known = {
        (method, path.removeprefix("/api"))
        for path, methods in schema["paths"].items()
        for method in methods
    }
    reported = {
        (
            method,
            path.partition("?")[0]
            .replace("{run}", "{run_id}")
            .replace("{pool}", "{pool_id}")
            .replace("{evaluation}", "{evaluation_id}")
            .replace("replicas/1", "replicas/{number}")
            .replace("attempts/1", "attempts/{attempt}")
            .replace("rounds.csv", "{table}.{format}")
            .replace("export.csv", "export.{format}")
            .replace("spend.csv", "spend.{format}")
            .replace("logs.txt", "logs.{format}")
            .replace("{alert}", "{alert_id}")
            .replace("{view}", "{view_id}")
            .replace("{run_view}", "{view_id}")
            .replace("{board}", "{board_id}")
            .replace("{sweep}", "{sweep_id}"),
        )
        for method, path in CALLS
    }
    assert reported | OF_ADMINISTRATORS | OF_ONESELF == known


def evaluation_of(run: Any) -> int:
    """A queued evaluation of the run, which has no checkpoint."""
    found = run.evaluations.first()
    pk: int = (found or seed_evaluations.queue(seed_evaluations.evaluations(run), 2)).pk
    return pk


@matrix("kind", KINDS, fast=("anonymous", "stranger"))
@pytest.mark.parametrize(("method", "path"), CALLS, ids=IDS)
def test_with_a_session(method: str, path: str, kind: str, run: Run, call: Call) -> None:
    response = call(client_for(kind, run.owner), method, path)
    assert response.status_code == CALLS[method, path][KINDS.index(kind)], response.content


@matrix("kind", ROLES, fast=("stranger",))
@pytest.mark.parametrize(("method", "path"), CALLS, ids=IDS)
def test_with_a_token(method: str, path: str, kind: str, call: Call, token_of: Any) -> None:
    headers = {"Authorization": f"Bearer {token_of(kind, ROLES[kind])}"}
    # CSRF protection is only for browsers.
    response = call(Client(enforce_csrf_checks=True), method, path, **headers)
    assert response.status_code == CALLS[method, path][KINDS.index(kind)], response.content


def test_read_only_tokens_cannot_change_anything(call: Call, token_of: Any) -> None:
    headers = {"Authorization": f"Bearer {token_of('root', 'admin', 'read')}"}
    for method, path in CALLS:
        response = call(Client(), method, path, **headers)
        looks = (method == "get" or (method, path) in LOOKS) and (method, path) not in OPERATES
        assert response.status_code == (200 if looks else 403), (method, path)
        if not looks:
            expected = "expected the scope operate, found read"
            assert response.json()["detail"] == expected, (method, path)


def test_user_without_a_role_is_rejected(call: Call, token_of: Any) -> None:
    headers = {"Authorization": f"Bearer {token_of('no-role', '')}"}
    for method, path in CALLS:
        response = call(Client(), method, path, **headers)
        assert response.status_code == (200 if path == "/me" else 403), (method, path)


def test_sessions_need_a_csrf_token(run: Run, call: Call) -> None:
    client = client_for("owner", run.owner, enforce_csrf_checks=True)
    for method, path in CALLS:
        if method == "get":
            continue
        response = call(client, method, path)
        assert response.status_code == 403, (method, path)
        assert "CSRF" in response.json()["detail"], (method, path)
        run.refresh_from_db()
        assert run.state == "running", (method, path)


def test_sessions_with_a_csrf_token_can_change_runs(run: Run, call: Call) -> None:
    client = client_for("owner", run.owner, enforce_csrf_checks=True)
    client.get("/runs/new")
    csrf = client.cookies["csrftoken"].value
    response = call(client, "post", f"{RUN}/stop", **{"X-CSRFToken": csrf})
    assert response.json() == {"changed": True, "state": "stopping"}


@pytest.mark.parametrize(
    "header", ["Bearer arch_wrong", "Bearer ", "Basic b3duZXI6eA==", "Bearer é"]
)
def test_an_invalid_token_is_rejected_despite_a_session(header: str, run: Any) -> None:
    client = client_for("owner", run.owner)
    response = client.get("/api/runs", headers={"Authorization": header})
    assert response.status_code == 401
    assert response["WWW-Authenticate"] == 'Bearer realm="archipelago"'
    assert "expected a valid token" in response.json()["detail"]


def test_an_unknown_run_is_a_json_404(owner: Any) -> None:
    response = owner.get("/runs/00000000-0000-4000-8000-000000000000")
    assert response.status_code == 404
    assert response.json()["detail"].startswith("not found")


def test_an_unknown_path_is_a_json_404(db: None) -> None:
    calls = (
        Client().get("/api/runs/x"),
        Client().post("/api/nonsense/of/some/kind"),
        Client().get("/api/runs/a%0Ab"),
        Client().delete("/api/%0A"),
    )
    for response in calls:
        assert response.status_code == 404
        assert response.json()["detail"].startswith("no operation ")


@pytest.mark.parametrize(
    ("method", "path"),
    sorted(OF_ADMINISTRATORS),
    ids=[" ".join(c) for c in sorted(OF_ADMINISTRATORS)],
)
def test_settings_are_refused_to_others_before_anything_is_looked_up(
    method: str, path: str, token_of: Any
) -> None:
    # The ids exist nowhere: 404 would be the answer to a caller with access.
    ids = {"delivery_id": "0" * 8 + "-0000-0000-0000-" + "0" * 12, "backend": "modal"}
    names = {"hardware": "H100", "scheme": "s3", "name": "nora", "budget_id": "7"}
    path = path.format(**ids, **names, credential_id="7", webhook_id="7")

    def status(token: str = "") -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return (
            Client()
            .generic(method.upper(), f"/api{path}", "{}", "application/json", headers=headers)
            .status_code
        )

    every = ("read", "operate", "admin")
    assert status() == 401
    assert status(token_of("vera", "viewer", *every)) == 403
    assert status(token_of("olga", "operator", *every)) == 403
    assert status(token_of("root", "admin", "read", "operate")) == 403


def test_the_schema_is_public_and_the_docs_need_a_user(db: None) -> None:
    result = Client().get("/api/openapi.json")
    assert result.status_code == 200
    assert result.json()["openapi"].startswith("3.1")
    assert Client().get("/api/docs").status_code == 302


def test_authentication_is_repeated_for_every_request(run: Any, owner: Any) -> None:
    assert owner.post(f"/runs/{run.pk}/stop").status_code == 200
    seed.user("owner", "viewer")
    assert owner.post(f"/runs/{run.pk}/stop").status_code == 403
