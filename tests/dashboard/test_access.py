"""Every view as anonymous, viewer, owner, stranger and admin."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from django.utils import timezone

from diloco.store.open import open_store
from runs.models import Checkpoint, Run, Sweep
from tests.browser import seed, seed_evaluations, seed_fleet
from tests.dashboard.page_harness import KINDS, client_for, make_user
from tests.matrix import matrix
from tests.module_rows import Unblock

pytestmark = pytest.mark.django_db

SIGN_IN, REFUSED, OK, MOVED = 302, 403, 200, 303
PAGES = {
    # name: method, then the status for anonymous, viewer, owner, stranger and admin
    "runs": ("get", SIGN_IN, OK, OK, OK, OK),
    "runs-json": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-new": ("get", SIGN_IN, REFUSED, OK, OK, OK),
    "run-estimate": ("post", SIGN_IN, REFUSED, OK, OK, OK),
    "run-test": ("post", SIGN_IN, REFUSED, OK, OK, OK),
    "run": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-snapshot": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-series": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-round": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-rounds": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-findings": ("get", SIGN_IN, OK, OK, OK, OK),
    "drawer-replica": ("get", SIGN_IN, OK, OK, OK, OK),
    "drawer-event": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-heatmap": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-timeline": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-logs": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-checkpoints": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-evaluations": ("get", SIGN_IN, OK, OK, OK, OK),
    "run-evaluation-add": ("get", SIGN_IN, REFUSED, OK, REFUSED, OK),
    "run-evaluation-change": ("get", SIGN_IN, REFUSED, OK, REFUSED, OK),
    "run-evaluation-remove": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-evaluate": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "checkpoint-download": ("get", SIGN_IN, REFUSED, OK, REFUSED, OK),
    "checkpoint-export": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-stop": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-mirror": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-pause": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-resume": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-save": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-describe": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-archive": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "run-delete": ("get", SIGN_IN, REFUSED, OK, REFUSED, OK),
    "pool-add": ("get", SIGN_IN, REFUSED, OK, REFUSED, OK),
    "pool-scale": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "replica": ("get", SIGN_IN, OK, OK, OK, OK),
    "replica-log": ("get", SIGN_IN, OK, OK, OK, OK),
    "replica-stop": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "replica-restart": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "runs-facets": ("get", SIGN_IN, OK, OK, OK, OK),
    "runs-totals": ("get", SIGN_IN, OK, OK, OK, OK),
    "runs-complete": ("get", SIGN_IN, OK, OK, OK, OK),
    "runs-bulk": ("post", SIGN_IN, REFUSED, MOVED, MOVED, MOVED),
    "compare": ("get", SIGN_IN, OK, OK, OK, OK),
    "compare-json": ("get", SIGN_IN, OK, OK, OK, OK),
    "compare-csv": ("get", SIGN_IN, OK, OK, OK, OK),
    "fleet": ("get", SIGN_IN, OK, OK, OK, OK),
    "alerts": ("get", SIGN_IN, OK, OK, OK, OK),
    "alerts-read": ("post", SIGN_IN, MOVED, MOVED, MOVED, MOVED),
    "alerts-summary": ("get", SIGN_IN, OK, OK, OK, OK),
    "search": ("get", SIGN_IN, OK, OK, OK, OK),
    "search-json": ("get", SIGN_IN, OK, OK, OK, OK),
    "banners": ("get", SIGN_IN, OK, OK, OK, OK),
    "api-docs": ("get", SIGN_IN, OK, OK, OK, OK),
    "settings": ("get", SIGN_IN, MOVED, MOVED, MOVED, MOVED),
    "settings-budgets": ("get", SIGN_IN, OK, OK, OK, OK),
    "settings-prices": ("get", SIGN_IN, OK, OK, OK, OK),
    "settings-backends": ("get", SIGN_IN, OK, OK, OK, OK),
    "settings-credentials": ("get", SIGN_IN, REFUSED, REFUSED, REFUSED, OK),
    "settings-trackers": ("get", SIGN_IN, REFUSED, REFUSED, REFUSED, OK),
    "settings-webhooks": ("get", SIGN_IN, REFUSED, REFUSED, REFUSED, OK),
    "spend": ("get", SIGN_IN, OK, OK, OK, OK),
    "sweeps": ("get", SIGN_IN, OK, OK, OK, OK),
    "sweep": ("get", SIGN_IN, OK, OK, OK, OK),
    "sweep-stop": ("post", SIGN_IN, REFUSED, MOVED, REFUSED, MOVED),
    "planner": ("get", SIGN_IN, OK, OK, OK, OK),
    "planner-json": ("get", SIGN_IN, OK, OK, OK, OK),
    "theme": ("post", SIGN_IN, MOVED, MOVED, MOVED, MOVED),
    "logout": ("post", SIGN_IN, MOVED, MOVED, MOVED, MOVED),
    "login": ("get", OK, MOVED, MOVED, MOVED, MOVED),
    "setup": ("get", MOVED, MOVED, MOVED, MOVED, MOVED),
}
SENT = {
    "runs-bulk": {"do": "archive"},
    "theme": {"theme": "dark"},
    "run-test": {"test": "rendezvous"},
    "pool-scale": {"count": "2"},
}
TESTED_ELSEWHERE = {
    # test_boards
    *("boards", "board", "board-new", "board-json", "board-edit", "board-delete"),
    *("runs-stream", "run-stream"),  # live/
    *("run-activity", "alert-acknowledge"),  # test_alerts_tab.py
    *("users", "user-role", "user-active", "user-reset"),  # security/test_users.py
    *("password", "choose-password", "admin-login"),  # test_account_*.py
    *("tokens", "token-revoke"),  # test_token_page.py
    "run-do",  # test_search.py
    *("settings-credential", "credential-new", "credential-test", "credential-delete"),
    *("settings-tracker", "tracker-new", "tracker-delete"),
    *("settings-webhook", "webhook-test", "webhook-delete", "delivery-repeat"),
    *("settings-price", "settings-traffic", "settings-budget", "budget-delete"),
    *("backend-reset", None),  # test_settings_pages.py, also redirects of old addresses
    *("view-save", "view"),  # test_saved_views_page.py
    *("run-view-save", "run-view"),  # test_run_views.py
    *("healthz", "readyz", "metrics"),  # test_health.py
}


@pytest.fixture(scope="module")
def seeded(module_rows: Unblock, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with module_rows():
        for kind in KINDS[1:]:
            make_user(kind)
        return run_with_checkpoint(tmp_path_factory.mktemp("bucket").as_uri())


@pytest.fixture
def run(db: None, seeded: Run) -> Run:
    return copy.deepcopy(seeded)


def run_with_checkpoint(rendezvous: str) -> Run:
    created: Run = seed.run(make_user("owner"), committed=2, replicas=2)
    for replica in created.replicas.all():
        seed_fleet.attempts(replica, backend="local", price=0.0, earlier=0, now=timezone.now())
    key = "checkpoints/00000002/00000.00001-0123abcd/weights.safetensors"
    created.rendezvous = rendezvous
    created.save()
    open_store(created.rendezvous).put(key, b"weights")
    Checkpoint.objects.create(
        run=created,
        round=2,
        key=key,
        size_bytes=7,
        created_at=timezone.now(),
        digest=hashlib.sha256(b"weights").hexdigest(),
    )
    seed_evaluations.evaluations(created)
    return created


def patterns_of(resolver: URLResolver) -> Iterator[URLPattern]:
    """All patterns but those of the API and of Django's administration, which have namespaces."""
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLPattern):
            yield pattern
        elif pattern.namespace is None:
            yield from patterns_of(pattern)


def test_every_url_is_in_the_table() -> None:
    names = {pattern.name for pattern in patterns_of(get_resolver())}
    assert {"runs", "run-stop", "users"} <= names
    assert names == set(PAGES) | TESTED_ELSEWHERE


@matrix("kind", KINDS, fast=("anonymous", "stranger"))
@pytest.mark.parametrize("name", PAGES)
def test_status_of_every_view_by_role(name: str, kind: str, run: Run) -> None:
    method, *expected = PAGES[name]
    client = client_for(kind, run.owner)
    response = getattr(client, method)(address(name, run), SENT.get(name))
    wanted = expected[KINDS.index(kind)]
    if wanted == SIGN_IN:
        assert response.status_code == 302
        assert response["Location"].startswith("/login")
    elif wanted == MOVED:
        assert response.status_code == 302
        assert not response["Location"].startswith("/login?next")
    else:
        assert response.status_code == wanted


def sweep_of(run: Run) -> Sweep:
    sweep, _ = Sweep.objects.get_or_create(
        owner=run.owner,
        submit_key="s",
        defaults={"parameters": [], "metric": "eval_loss", "created_at": run.created_at},
    )
    return sweep


def address(name: str, run: Run) -> str:
    kind, _, rest = name.partition("-")
    args: list[Any] = []
    if kind in ("replica", "pool") or (kind == "run" and rest not in ("new", "estimate", "test")):
        args.append(run.pk)
    if kind == "replica":
        args.append(1)
    if name == "run-round":
        args.append(2)
    if name == "drawer-replica":
        args += [run.pk, 1]
    if name == "drawer-event":
        args += [run.pk, run.events.first().pk]
    if kind == "checkpoint":
        args += [run.pk, run.checkpoints.get().pk]
    if name == "pool-scale":
        args.append(run.pools.get().pk)
    if name in ("sweep", "sweep-stop"):
        args.append(sweep_of(run).pk)
    if name in ("run-evaluation-change", "run-evaluation-remove", "run-evaluate"):
        args.append(run.evaluation_plans.get().name)
    query = {
        "run-series": "?of=loss",
        "replica-log": "?attempt=1",
    }
    return reverse(name, args=args) + query.get(name, "")


@pytest.mark.parametrize("name", sorted(n for n, row in PAGES.items() if row[0] == "post"))
def test_post_requires_a_csrf_token(name: str, run: Run) -> None:
    client = client_for("owner", run.owner, enforce_csrf_checks=True)
    response = client.post(address(name, run))
    assert response.status_code == 403
    assert b"This form has expired" in response.content
    run.refresh_from_db()
    assert run.state == "running"


@pytest.mark.parametrize("kind", ["viewer", "stranger", "owner", "admin"])
def test_the_stop_button_requires_permission(kind: str, run: Run) -> None:
    page = client_for(kind, run.owner).get(reverse("run", args=[run.pk])).content.decode()
    assert ("data-stop-form" in page) == (kind in ("owner", "admin"))


@pytest.mark.parametrize("kind", ["viewer", "stranger", "owner", "admin"])
def test_pool_and_replica_buttons_require_permission(kind: str, run: Run) -> None:
    client = client_for(kind, run.owner)
    may = kind in ("owner", "admin")
    page = client.get(reverse("run", args=[run.pk]) + "?tab=replicas").content.decode()
    for mark in ("data-may-operate", "data-scale-dialog", "data-replica-dialog", "Add a pool"):
        assert (mark in page) == may
    page = client.get(reverse("replica", args=[run.pk, 1])).content.decode()
    for mark in ('data-act="stop"', 'data-act="restart"'):
        assert (mark in page) == may


def test_users_without_a_role_see_no_replica(run: Run) -> None:
    client = Client()
    client.force_login(seed.user("no-role", ""))
    for name in ("replica", "replica-log"):
        assert client.get(address(name, run)).status_code == 404
    for name in ("replica-stop", "replica-restart", "pool-scale", "pool-add"):
        assert client.post(address(name, run), SENT.get(name)).status_code == 404


@pytest.mark.parametrize("kind", ["viewer", "owner"])
def test_the_new_run_button_requires_permission(kind: str, run: Run) -> None:
    page = client_for(kind, run.owner).get("/").content.decode()
    assert (f'href="{reverse("run-new")}"' in page) == (kind == "owner")


def test_an_unknown_run_is_a_styled_404(run: Run) -> None:
    response = client_for("owner", run.owner).get("/runs/00000000-0000-4000-8000-000000000000/")
    assert response.status_code == 404
    assert b"Page not found" in response.content


def test_the_server_error_page_needs_no_context(client: Any) -> None:
    from django.template.loader import render_to_string

    assert "Internal server error" in render_to_string("500.html")
