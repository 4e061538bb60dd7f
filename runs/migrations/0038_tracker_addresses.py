"""Move the address of a Weights & Biases server from the secrets of a tracker to its address."""

from django.db import migrations

from diloco.trackers.opening import Destination
from runs.credentials.vault import DecryptionError, seal, unseal

ADDRESS = "WANDB_BASE_URL"


def move(apps, schema_editor):
    trackers = apps.get_model("runs", "ExperimentTracker").objects.filter(kind="wandb")
    for tracker in trackers.exclude(sealed=""):
        try:
            secrets = unseal(tracker.sealed, name=f"tracker {tracker.name}")
        except DecryptionError:  # its key is lost: an administrator has to enter the secrets again
            trackers.filter(pk=tracker.pk).update(sealed="", enabled=False)
            continue
        if address := secrets.pop(ADDRESS, "").strip():
            try:
                Destination(kind="wandb", server=address[:500], project=tracker.project)
            except ValueError:  # no secret is sent to another server instead
                trackers.filter(pk=tracker.pk).update(sealed="", enabled=False)
                continue
            trackers.filter(pk=tracker.pk).update(
                server=address[:500], sealed=seal(secrets) if secrets else ""
            )


class Migration(migrations.Migration):
    dependencies = [("runs", "0037_evaluation_retrying_since")]

    operations = [migrations.RunPython(move, migrations.RunPython.noop)]
