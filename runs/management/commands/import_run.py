"""``manage.py import_run URI``: a run out of its bucket alone (:mod:`runs.restore.import_run`)."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from diloco.store.base import StoreError
from runs.exceptions import CannotDo, InvalidRun
from runs.restore.import_run import import_run


class Command(BaseCommand):
    help = "Rebuild a run from its rendezvous: after the database was lost, or into another one."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("uri", help="rendezvous of the run, such as s3://bucket/run")
        parser.add_argument("--owner", default="", help="user it shall belong to")
        parser.add_argument("--credential", default="", help="name of the one for the bucket")

    def handle(self, *args: Any, **options: Any) -> None:
        owner = None
        if options["owner"]:
            owner = User.objects.filter(username=options["owner"]).first()
            if owner is None:
                raise CommandError(f"expected a user, found none of name {options['owner']!r}")
        try:
            done = import_run(options["uri"], owner=owner, credential=options["credential"])
        except (CannotDo, InvalidRun, StoreError) as error:
            raise CommandError(str(error)) from error
        for remark in done.remarks:
            self.stderr.write(f"remark: {remark}")
        run = done.run
        self.stdout.write(
            f"run {run.pk} ({run.name}), {run.state}: {run.committed_rounds} rounds, "
            f"{run.replicas.count()} replicas, {run.events.count()} events"
        )
