"""``manage.py demo``: start the server, create a user, and launch and watch a demo run."""

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
from runs.submit.create import create_run
from runs.submit.run_draft import RunDraft

USER = "demo"


class Command(BaseCommand):
    help = "Start the server as serve does, submit the demo run and show its progress."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        address_options(parser)
        parser.add_argument(
            "--exit",
            action="store_true",
            help="exit when the run ends: status 0 if it succeeded, otherwise 1",
        )
        parser.add_argument(
            "--rounds", type=_count, default=None, help="total rounds of the run, at least 1"
        )
        parser.add_argument(
            "--steps", type=_count, default=None, help="local steps of a round, at least 1"
        )
        parser.add_argument(
            "--mixed",
            action="store_true",
            help="run on five backends, which must be reachable (make demo-mixed)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        progress = Progress(sys.stdout)
        draft = run_draft.mixed_demo() if options["mixed"] else run_draft.local_demo()
        shorter = {"total_rounds": options["rounds"], "sync_every": options["steps"]}
        if given := {name: number for name, number in shorter.items() if number is not None}:
            settings = replace(draft.settings, warmup_steps=1, **given)
            draft = replace(draft, settings=settings)
        try:
            with supervisor(options, report=progress.log) as running:
                succeeded = _serve(running, progress, draft, leave=options["exit"])
        except Stopped:
            succeeded = False
        except (SupervisorError, InvalidRun) as error:
            progress.finish()
            sys.exit(f"archipelago: {error}")
        if options["exit"] and not succeeded:
            sys.exit(1)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _serve(running: Supervisor, progress: Progress, draft: RunDraft, *, leave: bool) -> bool:
    """Return whether the run succeeded: when it ends if ``leave``, otherwise when stopped."""
    running.start()
    progress.log(f"serving {running.address} (state and logs in {running.var})")
    user = _demo_user(progress)
    for run in Run.objects.filter(owner=user, name=draft.name, state__in=RUN_ACTIVE):
        progress.log(f"stopping the demo run of {run.created_at:%Y-%m-%d %H:%M} UTC")
        replicas_and_pools.request_stop(run, actor=user)
    run = create_run(draft, owner=user, submit_key=f"demo-{secrets.token_hex(8)}")
    progress.log(f"watch the run at {running.address}runs/{run.pk}/")
    run = _watch(running, progress, run)
    succeeded = run.state == RunState.SUCCEEDED
    if run.ended:
        _report_result(progress, run, succeeded)
        if not leave:
            progress.log(f"still serving {running.address}; Ctrl-C stops it")
            while not running.stopping:
                running.wait()
    if running.stopping:
        progress.log("stopping")
    return succeeded


def _demo_user(progress: Progress) -> User:
    """The administrator of the demo. Only a hash of the password is stored."""
    user = User.objects.filter(username=USER).first()
    if user is not None:
        progress.log(
            f"sign in as {USER} with the password that was shown when the user was created "
            f"(to set a new one: .venv/bin/python manage.py changepassword {USER})"
        )
        return user
    password = secrets.token_urlsafe(9)
    progress.log(f"sign in as {USER} with password {password} (shown only once)")
    return User.objects.create_superuser(USER, password=password)


def _watch(running: Supervisor, progress: Progress, run: Run) -> Run:
    """Show progress until the run ends or the server is stopped."""
    seen = 0
    while True:
        run = selectors.runs_for(run.owner).get(pk=run.pk)
        # At most the newest events: older ones are on the page.
        rows = sorted(selectors.event_rows(run, after_id=seen), key=lambda row: int(row["id"]))
        progress.events(rows)
        seen = rows[-1]["id"] if rows else seen
        progress.show(selectors.run_header(run), now=timezone.now())
        if run.ended or running.stopping:
            progress.finish()
            return run
        running.wait(0.5)


def _report_result(progress: Progress, run: Run, succeeded: bool) -> None:
    reason = f": {run.state_reason}" if run.state_reason else ""
    progress.log(f"run {run.state}{reason}")
    if succeeded and run.eval_loss is not None:
        progress.log(
            f"evaluation loss of the global weights: {run.eval_loss:.3f} nats per byte "
            "(random guessing: 5.545)"
        )
    progress.log(f"generate text: .venv/bin/python -m diloco.generate {run.rendezvous}")
