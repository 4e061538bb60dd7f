"""``manage.py verify_audit_log``: check that the audit log is complete and unchanged."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from runs import audit


class Command(BaseCommand):
    help = "Verify the hash chain of the audit log. Exits with status 1 if it is broken."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument(
            "--head",
            default="",
            help="a hash that this command printed earlier; the log must still contain it",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        count, head, broken = audit.verify(expected_head=options["head"])
        if broken is not None:
            where = f"entry {broken.entry}: " if broken.entry else ""
            raise CommandError(
                f"the audit log is broken after {count} entries: {where}{broken.reason}"
            )
        self.stdout.write(f"{count} entries, the newest has the hash {head}")
