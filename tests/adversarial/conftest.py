"""The fixtures of :mod:`tests.runs`, and a client that requests all pages."""

from __future__ import annotations

import os
from typing import Any

import pytest
from django.test import Client
from hypothesis import HealthCheck, Phase, settings

from tests.browser import seed
from tests.runs.conftest import clock, executor, make_harness, make_run, outbox  # noqa: F401

LONG = "ARCHIPELAGO_ADVERSARIAL_EXAMPLES"
"""Number of examples, each with ``ARCHIPELAGO_ADVERSARIAL_RECORDS`` hostile records."""
settings.register_profile(
    "adversarial",
    max_examples=int(os.environ.get(LONG, "4")),
    deadline=None,
    derandomize=LONG not in os.environ,
    database=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def viewer(db: None) -> Any:
    """A client of the operator who owns the run; an exception is a response with status 500."""
    client = Client(raise_request_exception=False)
    client.force_login(seed.user("olga", "operator"))
    return client
