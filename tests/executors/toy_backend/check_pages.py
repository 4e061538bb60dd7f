"""The form, the API, the credential and the pages of a backend that only its package names.

Run by ``tests/executors/test_added_backend.py``, with the backend installed.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from dashboard.forms import PoolChoices, RunForm
from executors.registry import BACKENDS, pool_options
from runs.actions.credentials import save_credential
from runs.admin.credential_form import form_for
from runs.backends.executors import catalogue, executor_of, usable_backends
from runs.credentials.kinds import KINDS, is_secret
from runs.credentials.restrictions import refused_options
from runs.local_access import refused_local
from runs.models import Credential, ReplicaPool, Run
from runs.queries.replica_history import console_url
from runs.submit.run_draft import PoolDraft
from tests.browser import seed
from tests.dashboard.api.conftest import Program
from tests.dashboard.test_pool_form import sent

pytestmark = pytest.mark.django_db
POOL = PoolDraft(backend="nohup", hardware="cpu", count=2, options={"priority": 3})


@pytest.fixture(autouse=True)
def rendezvous(settings: Any, tmp_path: Any) -> None:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()


@pytest.fixture
def api() -> Program:
    from runs.actions import api_tokens

    user = seed.user("owner", "operator")
    _, text = api_tokens.issue(user, name="a test", scopes=["read", "operate"])
    return Program(text)


def test_the_registry_and_the_catalogue_list_it() -> None:
    assert BACKENDS["nohup"] == usable_backends()["nohup"] == "Detached processes"
    assert [hardware.name for hardware in catalogue().of("nohup")] == ["cpu"]
    assert pool_options("nohup") == {"memory_mb", "nice", "grace_s", "priority"}
    assert executor_of("nohup", None).backend == "nohup"


def test_the_submit_form_offers_it_and_reads_its_rows() -> None:
    choices = PoolChoices.load()
    assert ("nohup", "Detached processes") in choices.backends
    assert choices.option_data["nohup:cpu"]["price"] == "0.25"
    form = RunForm(sent(POOL, **{"pools.0.options": '{"priority": 3}'}))
    draft = form.draft()
    assert draft is not None
    assert draft.pools == (POOL,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 11}, "priority: expected a whole number of at least 0 points and at most 9"),
        ({"priority": "high"}, "priority: expected a whole number"),
        ({"queue": "fast"}, "queue"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_the_api_refuses_wrong_options_at_their_field(
    api: Program, options: dict[str, Any], message: str
) -> None:
    pool = {"backend": "nohup", "hardware": "cpu", "count": 1, "options": options}
    response = api.post("/runs", {"name": "Wrong", "pools": [pool]})
    assert response.status_code == 422, response.content
    assert "pools.0.options" in response.content.decode()
    assert message in response.content.decode()


def test_the_api_creates_a_run_on_it_and_the_pages_show_it(api: Program, client: Client) -> None:
    pool = {"backend": "nohup", "hardware": "cpu", "count": 2, "options": {"priority": 3}}
    response = api.post("/runs", {"name": "Sent", "pools": [pool]})
    assert response.status_code == 201, response.content
    stored = ReplicaPool.objects.get()
    assert (stored.backend, stored.options) == ("nohup", {"priority": 3})
    client.force_login(seed.user("owner", "operator"))
    assert "Detached processes" in client.get("/runs/new").content.decode()
    page = client.get(f"/runs/{Run.objects.get().pk}/")
    assert page.status_code == 200
    assert client.get("/?q=backend:nohup").status_code == 200


def test_its_credential_has_a_form_and_masked_values() -> None:
    form = form_for(KINDS["nohup"])({"name": "c", "variable_NOHUP_TOKEN": "t0ken"})
    assert form.is_valid(), form.errors
    assert "option_queue" in form.fields
    assert is_secret("NOHUP_TOKEN") and not is_secret("NOHUP_REGION")
    credential = Credential(kind="nohup", name="c", options={"queue": "fast"})
    save_credential(credential, typed={"NOHUP_TOKEN": "t0ken"}, actor=None)
    assert executor_of("nohup", credential).backend == "nohup"
    assert refused_options("nohup", credential, {"gpus": "0"})
    assert not refused_options("nohup", credential, {"nice": 1})


def test_its_permission_and_console_follow_from_the_description() -> None:
    assert "local backend" in refused_local(None, "nohup", {})
    handle = {"backend": "nohup", "data": {"key": "run/0"}}
    assert console_url(handle) == "https://nohup.example/jobs/run%2F0"
