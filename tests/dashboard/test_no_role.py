"""A user without a role sees no run in any way."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.browser import seed

pytestmark = pytest.mark.django_db


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(User.objects.create_user("no-role", password="nothing-to-see"))
    return client


@pytest.mark.parametrize("name", ["run", "run-snapshot", "run-logs", "run-stream"])
def test_a_run_is_not_shown(client: Client, name: str) -> None:
    run = seed.run(seed.user("owner", "operator"), committed=1, replicas=1)
    response = client.get(reverse(name, args=[run.pk]))
    assert response.status_code in (403, 404)


def test_the_list_is_empty_and_does_not_stream(client: Client) -> None:
    seed.run(seed.user("owner", "operator"), committed=1, replicas=1, name="secret run")
    assert b"secret run" not in client.get(reverse("runs")).content
    assert client.get(reverse("runs-stream")).status_code == 403


@pytest.mark.parametrize("name", ["fleet", "spend"])
def test_pages_about_all_runs_are_refused(client: Client, name: str) -> None:
    seed.run(seed.user("owner", "operator"), committed=1, replicas=1, name="secret run")
    for path in (reverse(name), f"/api/{name}"):
        response = client.get(path)
        assert response.status_code == 403
        assert b"secret run" not in response.content
