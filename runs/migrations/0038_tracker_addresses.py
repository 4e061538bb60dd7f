"""Move the address of a Weights & Biases server from the secrets of a tracker to its address.

A tracker whose secrets cannot be read now, or whose address is refused, keeps them unchanged:
:mod:`runs.credentials.tracker_addresses` moves the address, or names what is wrong, when they are used."""

import logging

from django.db import migrations

from runs.credentials.vault import DecryptionError
from runs.credentials.tracker_addresses import move_address

logger = logging.getLogger(__name__)


def move(apps, schema_editor):
    for tracker in apps.get_model("runs", "ExperimentTracker").objects.filter(kind="wandb"):
        try:
            move_address(tracker)
        except (DecryptionError, ValueError) as error:
            logger.warning("tracker %s: %s", tracker.name, error)


class Migration(migrations.Migration):
    dependencies = [("runs", "0037_evaluation_retrying_since")]

    operations = [migrations.RunPython(move, migrations.RunPython.noop)]
