"""Commands of the control plane to replicas: create-once objects under ``control/``.

Commands are numbered without gaps; a writer that finds a number taken uses the next one. The
database records a command after it is sent, so a command can be sent twice. Commands are therefore
idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, Command
from diloco.store.base import Store, StoreError
from runs.bulk import update_row
from runs.ingest.validation import refuse
from runs.models import Replica, Run

TRIES = 100
"""Numbers tried in one attempt. A process with write access to the bucket can take any number of
them, so an attempt is bounded and the next one continues where it stopped."""


class NoFreeNumber(StoreError):
    """All numbers that were tried are taken by objects that this server did not write."""


def send_stop(run: Run, store: Store, now: datetime) -> None:
    """Send the command to end the run at its newest committed round."""
    _send(run, store, Command(n=run.next_command, command="stop", wall_s=now.timestamp()))
    Run.objects.filter(pk=run.pk, stop_sent_at=None).update(stop_sent_at=now)
    run.stop_sent_at = now


def send_resume(run: Run, store: Store, now: datetime) -> None:
    """Cancel earlier stop commands so that the run continues. Sent before any replica launches."""
    _send(run, store, Command(n=run.next_command, command="resume", wall_s=now.timestamp()))


def send_save(run: Run, store: Store, now: datetime) -> None:
    """Save a checkpoint of the next committed round."""
    arguments: Mapping[str, Any] = {"round": run.next_round - 1}
    command = Command(
        n=run.next_command, command="save", arguments=arguments, wall_s=now.timestamp()
    )
    _send(run, store, command)
    update_row(run, save_sent_at=run.save_requested_at)


def send_drain(replica: Replica, store: Store, now: datetime, *, within_s: float) -> None:
    """Drain this incarnation: it contributes its local steps, saves its state and exits."""
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
    update_row(replica, drain_sent_at=now)


def _send(run: Run, store: Store, command: Command) -> None:
    for _ in range(TRIES):
        if store.create(keys.control(command.n), command.to_bytes()):
            return _mark_sent(run, command.n)
        try:
            existing = Command.read(store, keys.control(command.n))
            if _meaning(existing) == _meaning(command):
                return _mark_sent(run, command.n)
        except BadRecord as error:
            refuse(run, keys.control(command.n), error)
        command = replace(command, n=command.n + 1)
    _mark_sent(run, command.n - 1)  # the next attempt continues here
    raise NoFreeNumber(
        f"expected {keys.control(command.n)} to be free or near a free one, found "
        f"{TRIES} objects before it that are not of this server"
    )


def _mark_sent(run: Run, n: int) -> None:
    run.next_command = n + 1
    Run.objects.filter(pk=run.pk, next_command__lt=run.next_command).update(
        next_command=run.next_command
    )


def _meaning(command: Command) -> tuple[Any, ...]:
    names = ("incarnation", "round")
    return command.command, command.replica, *(command.arguments.get(name) for name in names)
