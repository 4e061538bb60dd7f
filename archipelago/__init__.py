"""Command line and Python client for an Archipelago server.

The package uses only the Python standard library. It therefore runs wherever the replica library
runs, and its dependencies cannot conflict with those of a server. See ``docs/cli.md``.

    from archipelago import Client

    client = Client.from_login()
    run = client.submit({"name": "first", "pools": [{"count": 4}]})
    for run in client.watch(run.id):
        print(run.committed_rounds, run.train_loss)
"""

from archipelago.client import Client
from archipelago.errors import ApiError, Invalid, LoginNeeded, NotFound, Refused, Unreachable

__all__ = ["ApiError", "Client", "Invalid", "LoginNeeded", "NotFound", "Refused", "Unreachable"]
