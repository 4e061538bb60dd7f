"""``manage.py import_run URI``: restore a run from its bucket (:mod:`runs.restore.import_run`)."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from diloco.store.base import StoreError
from runs.exceptions import ActionRefused, InvalidRun
from runs.restore.import_run import import_run


class Command(BaseCommand):
    help = "Restore a run from its rendezvous: after losing the database, or into another one."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("uri", help="rendezvous of the run, e.g. s3://bucket/run")
        parser.add_argument("--owner", default="", help="username of the owner")
        parser.add_argument("--credential", default="", help="name of the bucket's credential")

    def handle(self, *args: Any, **options: Any) -> None:
        owner = None
        if options["owner"]:
            owner = User.objects.filter(username=options["owner"]).first()
            if owner is None:
                raise CommandError(f"expected a user, found none named {options['owner']!r}")
        try:
            done = import_run(options["uri"], owner=owner, credential=options["credential"])
        except (ActionRefused, InvalidRun, StoreError) as error:
            raise CommandError(str(error)) from error
        for remark in done.remarks:
            self.stderr.write(f"remark: {remark}")
        run = done.run
        self.stdout.write(
            f"run {run.pk} ({run.name}), {run.state}: {run.committed_rounds} rounds, "
            f"{run.replicas.count()} replicas, {run.events.count()} events"
        )
