"""``manage.py serve``: the whole server on this machine, until Ctrl-C."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from dashboard.management.serving import address_options, supervisor
from dashboard.supervisor import Stopped, SupervisorError


class Command(BaseCommand):
    help = "Start broker, worker, beat and web server under one supervisor, until Ctrl-C."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        address_options(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with supervisor(options, say=self.say) as running:
                running.start()
                self.say(f"serving {running.address} (state and logs in {running.var})")
                while not running.stopping:
                    running.wait()
                self.say("stopping")
        except Stopped:
            pass
        except SupervisorError as error:
            sys.exit(f"archipelago: {error}")

    def say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
