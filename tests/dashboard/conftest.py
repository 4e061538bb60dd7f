"""The user of the page tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from tests.browser import seed


@pytest.fixture
def operator_user(client: Client, db: None, settings: Any, tmp_path: Path) -> Any:
    """An operator who is signed in with ``client``. New runs have folders of the test."""
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    user = seed.user("olga", "operator")
    client.force_login(user)
    return user


@pytest.fixture
def run(operator_user: Any, tmp_path: Path) -> Any:
    """A run of the operator with its own folder."""
    from runs.models import Run

    created = seed.run(operator_user, name="First", replicas=2)
    Run.objects.update(rendezvous=(tmp_path / "first").as_uri())
    created.refresh_from_db()
    return created
