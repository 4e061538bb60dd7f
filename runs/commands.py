"""What the control plane asks of replicas, as create-once objects under ``control/``.

Left out until there are other commands than *stop*: a queue of them.
"""

from __future__ import annotations

from datetime import datetime

from diloco.rendezvous import keys
from diloco.rendezvous.records import BadRecord, Command
from diloco.rendezvous.store import Store
from runs.models import Run
from runs.reading import refuse


def send_stop(run: Run, store: Store, now: datetime) -> None:
    """Write the command under the next free number; another writer's command takes the next."""
    command = Command(n=run.next_command, command="stop", wall_s=now.timestamp())
    while not store.create(keys.control(command.n), command.to_bytes()):
        try:
            theirs = Command.from_bytes(store.get(keys.control(command.n)))
            if theirs.command == "stop" and theirs.replica is None:
                break
        except BadRecord as error:
            refuse(run, keys.control(command.n), error)
        command = Command(n=command.n + 1, command="stop", wall_s=now.timestamp())
    Run.objects.filter(pk=run.pk, stop_sent_at=None).update(
        stop_sent_at=now, next_command=command.n + 1
    )
    run.stop_sent_at = now
