"""Archipelago from a terminal and from programs: the command line, and the client it is made of.

Nothing but Python's own library is needed, so that it works wherever the replica library is
installed, and no server's version can get in the way of another's. ``docs/cli.md`` tells of it.

    from archipelago import Client

    client = Client.from_login()
    run = client.submit({"name": "first", "pools": [{"count": 4}]})
    for run in client.watch(run.id):
        print(run.committed_rounds, run.train_loss)
"""

from archipelago.client import Client
from archipelago.errors import ApiError, Invalid, LoginNeeded, NotFound, Refused, Unreachable

__all__ = ["ApiError", "Client", "Invalid", "LoginNeeded", "NotFound", "Refused", "Unreachable"]
