"""Addresses of Weights & Biases servers that an earlier version kept among the secrets."""

from __future__ import annotations

import importlib
import io
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.management import CommandError, call_command
from django.utils import timezone

from diloco.trackers.base import TrackerError
from diloco.trackers.opening import Destination
from executors.base import AccountError
from runs.actions import trackers as actions
from runs.credentials.vault import seal, unseal
from runs.models import ExperimentTracker
from runs.trackers import mirror
from tests.runs.run_harness import person

pytestmark = pytest.mark.django_db


def earlier_tracker(name: str, address: str) -> ExperimentTracker:
    """A tracker of a version that kept the address among the secrets."""
    secrets = {"WANDB_API_KEY": "key", "WANDB_BASE_URL": address}
    return ExperimentTracker.objects.create(
        name=name, kind="wandb", project="p", sealed=seal(secrets), created_at=timezone.now()
    )


def migrate_addresses() -> None:
    from django.apps import apps

    importlib.import_module("runs.migrations.0038_tracker_addresses").move(apps, None)


def test_an_earlier_wandb_address_moves_out_of_the_secrets() -> None:
    row = earlier_tracker("own", "https://wb.example")
    migrate_addresses()
    row.refresh_from_db()
    assert (row.server, row.enabled) == ("https://wb.example", True)
    assert unseal(row.sealed, name="own") == {"WANDB_API_KEY": "key"}


@pytest.mark.parametrize("when", ["opened", "resealed", "saved"])
def test_an_upgrade_without_the_key_loses_no_address(settings: Any, when: str) -> None:
    """The key comes back after the migration; the API key is never sent to another server."""
    row, olga = earlier_tracker("own", "https://1.1.1.1"), person("olga", "operator")
    sealed, keys = row.sealed, settings.CREDENTIALS_KEYS
    settings.CREDENTIALS_KEYS = [Fernet.generate_key().decode()]
    migrate_addresses()
    row.refresh_from_db()
    assert (row.server, row.sealed, row.enabled) == ("", sealed, True)
    with pytest.raises(AccountError, match="credential 'tracker own' cannot be opened"):
        mirror.open_stored(row)
    settings.CREDENTIALS_KEYS = keys
    if when == "opened":
        mirror.open_stored(row)
    elif when == "resealed":
        call_command("reseal_credentials", stdout=io.StringIO())
        row.refresh_from_db()
    else:
        with pytest.raises(ValueError, match="the address has changed, so enter WANDB_API_KEY"):
            place = Destination(kind="wandb", project="p")
            actions.save_tracker("own", place, secrets={}, actor=olga, tracker=row)
        place = Destination(kind="wandb", server="https://1.1.1.1", project="p")
        actions.save_tracker("own", place, secrets={}, actor=olga, tracker=row)
    assert row.server == "https://1.1.1.1"
    assert unseal(row.sealed, name="own") == {"WANDB_API_KEY": "key"}


@pytest.mark.parametrize(
    ("address", "reason"),
    [("http://u:p@wb.example", "without secrets"), (f"https://{'w' * 500}.example", "at most 500")],
)
def test_an_earlier_address_that_is_refused_stays_with_its_secrets(
    address: str, reason: str
) -> None:
    row = earlier_tracker("bad", address)
    sealed = row.sealed
    migrate_addresses()
    row.refresh_from_db()
    assert (row.server, row.sealed) == ("", sealed)
    with pytest.raises(TrackerError, match=reason):
        mirror.open_stored(row)
    with pytest.raises(CommandError, match=f"tracker bad: .*{reason}"):
        call_command("reseal_credentials", stdout=io.StringIO())
    place = Destination(kind="wandb", server="https://1.1.1.1", project="p")
    new = {"WANDB_API_KEY": "new"}
    actions.save_tracker("bad", place, secrets=new, actor=person("olga", "operator"), tracker=row)
    assert unseal(row.sealed, name="bad") == new
