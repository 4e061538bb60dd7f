"""``manage.py setup_token``: print the token for creating the first administrator."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from dashboard.security import setup_token


class Command(BaseCommand):
    help = (
        "Print the setup token for creating the first administrator. Run it with the "
        "server's own Python: .venv/bin/python manage.py setup_token"
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if not setup_token.is_needed():
            raise CommandError("a user exists already: the setup token is not needed")
        self.stdout.write(setup_token.setup_token())
