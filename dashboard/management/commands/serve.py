"""``manage.py serve``: run the server on this machine until Ctrl-C."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from dashboard.management.serving import address_options, supervisor
from dashboard.presentation.progress import Progress
from dashboard.security import setup_token
from dashboard.server.supervisor import Stopped, SupervisorError


class Command(BaseCommand):
    help = "Run broker, workers, beat and web server under one supervisor, until Ctrl-C."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        address_options(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        log = Progress(sys.stdout).log
        try:
            with supervisor(options, report=log) as running:
                running.start()
                log(f"serving {running.address} (state and logs in {running.var})")
                if setup_token.is_needed():
                    token = setup_token.setup_token()
                    log(f"create the first administrator at {running.address}setup?token={token}")
                while not running.stopping:
                    running.wait()
                log("stopping")
        except Stopped:
            pass
        except SupervisorError as error:
            sys.exit(f"archipelago: {error}")
