"""``manage.py demo``: the whole server, a user, and a run that trains before your eyes."""

from __future__ import annotations

import secrets
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.utils import timezone

from dashboard.management.serving import address_options, supervisor
from dashboard.presentation.progress import Progress
from dashboard.server.supervisor import Stopped, Supervisor, SupervisorError
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.queries import selectors
from runs.states import RUN_ACTIVE, RunState
from runs.submit import run_draft
from runs.submit.run_draft import RunDraft

USER = "demo"


class Command(BaseCommand):
    help = "Like serve, and submit the demo run and show its progress."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        address_options(parser)
        parser.add_argument(
            "--exit",
            action="store_true",
            help="end when the run has ended: status 0 when it succeeded, 1 when it did not",
        )

        parser.add_argument(
            "--rounds", type=_rounds, default=None, help="total rounds of the run, at least 1"
        )
        parser.add_argument(
            "--mixed",
            action="store_true",
            help="submit the run on five backends; they must be there (make demo-mixed)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        progress = Progress(sys.stdout)
        draft = run_draft.mixed_demo() if options["mixed"] else run_draft.local_demo()
        if options["rounds"] is not None:
            settings = replace(draft.settings, total_rounds=options["rounds"], warmup_steps=1)
            draft = replace(draft, settings=settings)
        try:
            with supervisor(options, say=progress.say) as running:
                succeeded = _serve(running, progress, draft, leave=options["exit"])
        except Stopped:
            succeeded = False
        except (SupervisorError, InvalidRun) as error:
            progress.finish()
            sys.exit(f"archipelago: {error}")
        if options["exit"] and not succeeded:
            sys.exit(1)


def _rounds(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _serve(running: Supervisor, progress: Progress, draft: RunDraft, *, leave: bool) -> bool:
    """Whether the run succeeded; returns at once when it has ended if ``leave``, else on a stop."""
    running.start()
    progress.say(f"serving {running.address} (state and logs in {running.var})")
    user = _demo_user(progress)
    for run in Run.objects.filter(owner=user, name=draft.name, state__in=RUN_ACTIVE):
        progress.say(f"stopping the demo run of {run.created_at:%Y-%m-%d %H:%M} UTC")
        replicas_and_pools.request_stop(run, actor=user)
    run = replicas_and_pools.create_run(
        draft, owner=user, submit_key=f"demo-{secrets.token_hex(8)}"
    )
    progress.say(f"watch the run at {running.address}runs/{run.pk}/")
    run = _watch(running, progress, run)
    succeeded = run.state == RunState.SUCCEEDED
    if run.ended:
        _say_result(progress, run, succeeded)
        if not leave:
            progress.say(f"still serving {running.address}; Ctrl-C stops it")
            while not running.stopping:
                running.wait()
    if running.stopping:
        progress.say("stopping")
    return succeeded


def _demo_user(progress: Progress) -> User:
    """The user of the demo, an administrator. Only a hash of the password is kept."""
    user = User.objects.filter(username=USER).first()
    if user is not None:
        progress.say(
            f"sign in as {USER} with the password shown when it was made "
            f"(a new one: .venv/bin/python manage.py changepassword {USER})"
        )
        return user
    password = secrets.token_urlsafe(9)
    progress.say(f"sign in as {USER} with password {password} (shown only now)")
    return User.objects.create_superuser(USER, password=password)


def _watch(running: Supervisor, progress: Progress, run: Run) -> Run:
    """Show the run until it has ended or somebody wants to stop."""
    seen = 0
    while True:
        run = selectors.runs_for(run.owner).get(pk=run.pk)
        # Newest first, and only of late: what was missed is on the page.
        rows = sorted(selectors.event_rows(run, after_id=seen), key=lambda row: int(row["id"]))
        progress.events(rows)
        seen = rows[-1]["id"] if rows else seen
        progress.show(selectors.run_header(run), now=timezone.now())
        if run.ended or running.stopping:
            progress.finish()
            return run
        running.wait(0.5)


def _say_result(progress: Progress, run: Run, succeeded: bool) -> None:
    reason = f": {run.state_reason}" if run.state_reason else ""
    progress.say(f"the run {run.state}{reason}")
    if succeeded and run.eval_loss is not None:
        progress.say(
            f"evaluation loss of the global weights: {run.eval_loss:.3f} nats per byte "
            "(5.545 would be guessing)"
        )
        progress.say(f"text from it: .venv/bin/python -m diloco.generate {run.rendezvous}")
