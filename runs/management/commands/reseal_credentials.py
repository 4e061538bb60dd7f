"""``manage.py reseal_credentials``: encrypt stored secrets with the first key: those of
credentials, webhooks and trackers.

To replace a key: add the new one in front, restart all processes, run this command, remove the old
key and restart again. The exit status is 1 if rows could not be decrypted; the command names them
and leaves them unchanged.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from runs.credentials.tracker_addresses import move_address
from runs.credentials.vault import DecryptionError, reseal
from runs.models import Credential, ExperimentTracker, Webhook


class Command(BaseCommand):
    help = "Encrypt every stored secret with the first key of ARCHIPELAGO_CREDENTIALS_KEY."

    def handle(self, *args: Any, **options: Any) -> None:
        done, failed = 0, []
        rows: list[Credential | Webhook | ExperimentTracker] = [
            *Credential.objects.exclude(sealed=""),
            *Webhook.objects.all(),
            *ExperimentTracker.objects.exclude(sealed=""),
        ]
        for row in rows:
            try:
                if isinstance(row, ExperimentTracker):
                    move_address(row)
                sealed = reseal(row.sealed, name=row.name) if row.sealed else ""
            except DecryptionError as error:
                failed.append(str(error))
                continue
            except ValueError as error:
                failed.append(f"tracker {row.name}: {error}")
                continue
            # A row that changed meanwhile is already encrypted with the first key.
            unchanged = type(row)._default_manager.filter(pk=row.pk, sealed=row.sealed)
            done += unchanged.update(sealed=sealed)
        keys = len(settings.CREDENTIALS_KEYS)
        self.stdout.write(f"{done} sealed with the first of {keys} key{'' if keys == 1 else 's'}")
        if failed:
            raise CommandError("\n".join(failed))
