"""The user of the page tests."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from tests.browser import seed


@pytest.fixture
def operator_user(client: Client, db: None) -> Any:
    """An operator who is signed in with ``client``."""
    user = seed.user("olga", "operator")
    client.force_login(user)
    return user
