"""What the control plane asks of replicas, as create-once objects under ``control/``.

Numbers have no gaps; whoever finds one taken takes the next. What was sent is remembered in the
database after it was sent, so a command may be there twice: each means the same twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, Command
from diloco.store.base import Store, StoreError
from runs.ingest.validation import refuse
from runs.models import Replica, Run

TRIES = 100
"""Numbers that are tried at once. Whoever can write to the bucket can take any number of them, so
one attempt ends, and the next goes on where it ended."""


class Crowded(StoreError):
    """Other objects lie where the next one is to be written."""


def send_stop(run: Run, store: Store, now: datetime) -> None:
    """End the run at its newest committed round."""
    _send(run, store, Command(n=run.next_command, command="stop", wall_s=now.timestamp()))
    Run.objects.filter(pk=run.pk, stop_sent_at=None).update(stop_sent_at=now)
    run.stop_sent_at = now


def send_resume(run: Run, store: Store, now: datetime) -> None:
    """Take back the stops there are: the run goes on. Sent before anything of it is launched."""
    _send(run, store, Command(n=run.next_command, command="resume", wall_s=now.timestamp()))


def send_save(run: Run, store: Store, now: datetime) -> None:
    """Have the next round that is committed saved as a checkpoint."""
    asked_at = run.save_requested_at
    arguments: Mapping[str, Any] = {"round": run.next_round - 1}
    command = Command(
        n=run.next_command, command="save", arguments=arguments, wall_s=now.timestamp()
    )
    _send(run, store, command)
    Run.objects.filter(pk=run.pk).update(save_sent_at=asked_at)
    run.save_sent_at = asked_at


def send_drain(replica: Replica, store: Store, now: datetime, *, within_s: float) -> None:
    """Ask this incarnation to give its work to a round, save its state, and leave."""
    run = replica.run
    arguments: Mapping[str, Any] = {"incarnation": replica.incarnation, "within_s": within_s}
    _send(
        run,
        store,
        Command(
            n=run.next_command,
            command="drain",
            replica=replica.number,
            arguments=arguments,
            wall_s=now.timestamp(),
        ),
    )
    Replica.objects.filter(pk=replica.pk).update(drain_sent_at=now)
    replica.drain_sent_at = now


def _send(run: Run, store: Store, command: Command) -> None:
    for _ in range(TRIES):
        if store.create(keys.control(command.n), command.to_bytes()):
            return _sent(run, command.n)
        try:
            theirs = Command.read(store, keys.control(command.n))
            if _meaning(theirs) == _meaning(command):
                return _sent(run, command.n)
        except BadRecord as error:
            refuse(run, keys.control(command.n), error)
        command = replace(command, n=command.n + 1)
    _sent(run, command.n - 1)  # the next attempt goes on from here
    raise Crowded(
        f"expected {keys.control(command.n)} to be free or near a free one, found "
        f"{TRIES} objects before it that are not of this server"
    )


def _sent(run: Run, n: int) -> None:
    run.next_command = n + 1
    Run.objects.filter(pk=run.pk, next_command__lt=run.next_command).update(
        next_command=run.next_command
    )


def _meaning(command: Command) -> tuple[Any, ...]:
    names = ("incarnation", "round")
    return command.command, command.replica, *(command.arguments.get(name) for name in names)
