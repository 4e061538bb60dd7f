"""``manage.py reseal_credentials``: seal every credential, and every webhook's secret, with the
first of the keys.

To replace a key: put a new one in front, restart all processes, run this, take the old one away,
restart them again. Exit status 1 if some could not be opened; those are named and left as they are.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from runs.credentials.vault import CannotOpen, reseal
from runs.models import Credential, Webhook


class Command(BaseCommand):
    help = "Seal every credential with the first key of ARCHIPELAGO_CREDENTIALS_KEY."

    def handle(self, *args: Any, **options: Any) -> None:
        done, failed = 0, []
        rows: list[Credential | Webhook] = [*Credential.objects.exclude(sealed="")]
        rows += Webhook.objects.all()
        for row in rows:
            try:
                sealed = reseal(row.sealed, name=row.name)
            except CannotOpen as error:
                failed.append(str(error))
                continue
            # One that was changed meanwhile was sealed with the first key by that.
            same = type(row)._default_manager.filter(pk=row.pk, sealed=row.sealed)
            done += same.update(sealed=sealed)
        keys = len(settings.CREDENTIALS_KEYS)
        self.stdout.write(f"{done} sealed with the first of {keys} key{'' if keys == 1 else 's'}")
        if failed:
            raise CommandError("\n".join(failed))
