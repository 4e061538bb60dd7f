"""A run, and users with tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from tests.browser import seed, seed_fleet


@pytest.fixture
def run(db: None) -> Any:
    return run_with_attempts()


def run_with_attempts() -> Any:
    """A run of the user ``owner`` whose replicas have one attempt each."""
    from django.utils import timezone

    created = seed.run(seed.user("owner", "operator"), committed=3, replicas=2)
    for replica in created.replicas.all():
        seed_fleet.attempts(replica, backend="local", price=0.0, earlier=0, now=timezone.now())
    return created


@pytest.fixture
def token_of(db: None) -> Callable[..., str]:
    """The text of a new token of a user with that role."""
    from runs.actions import api_tokens

    def make(name: str, role: str, *scopes: str) -> str:
        _, text = api_tokens.issue(
            seed.user(name, role), name="a test", scopes=list(scopes or ("read", "operate"))
        )
        return text

    return make


class Program:
    """Calls the API as a program."""

    def __init__(self, token: str = "", **headers: str) -> None:
        self.client = Client(enforce_csrf_checks=True)
        self.headers = headers | ({"Authorization": f"Bearer {token}"} if token else {})

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(f"/api{path}", query, headers=self.headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        data = {} if body is None else body
        return self.client.post(
            f"/api{path}", data, content_type="application/json", headers=self.headers | headers
        )


@pytest.fixture
def owner(token_of: Callable[..., str]) -> Program:
    return Program(token_of("owner", "operator"))


@pytest.fixture
def program() -> type[Program]:
    return Program
