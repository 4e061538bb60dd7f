"""``manage.py setup_token``: what the page that creates the first administrator asks for."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from dashboard.security import setup_token


class Command(BaseCommand):
    help = (
        "Print the set-up token, which the first administrator is created with. Run it with the "
        "server's own Python: .venv/bin/python manage.py setup_token"
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if not setup_token.is_needed():
            raise CommandError("this server has users: no set-up token is needed")
        self.stdout.write(setup_token.setup_token())
