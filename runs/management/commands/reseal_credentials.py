"""``manage.py reseal_credentials``: encrypt credentials and webhook secrets with the first key.

To replace a key: add the new one in front, restart all processes, run this command, remove the old
key and restart again. The exit status is 1 if rows could not be decrypted; the command names them
and leaves them unchanged.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from runs.credentials.vault import DecryptionError, reseal
from runs.models import Credential, Webhook


class Command(BaseCommand):
    help = "Encrypt every credential with the first key of ARCHIPELAGO_CREDENTIALS_KEY."

    def handle(self, *args: Any, **options: Any) -> None:
        done, failed = 0, []
        rows: list[Credential | Webhook] = [*Credential.objects.exclude(sealed="")]
        rows += Webhook.objects.all()
        for row in rows:
            try:
                sealed = reseal(row.sealed, name=row.name)
            except DecryptionError as error:
                failed.append(str(error))
                continue
            # A row that changed meanwhile is already encrypted with the first key.
            unchanged = type(row)._default_manager.filter(pk=row.pk, sealed=row.sealed)
            done += unchanged.update(sealed=sealed)
        keys = len(settings.CREDENTIALS_KEYS)
        self.stdout.write(f"{done} sealed with the first of {keys} key{'' if keys == 1 else 's'}")
        if failed:
            raise CommandError("\n".join(failed))
