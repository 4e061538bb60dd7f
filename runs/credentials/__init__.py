"""Secrets of backends and buckets: sealed in the database, opened only where they are used.

- :mod:`~runs.credentials.vault` seals and opens;
- :mod:`~runs.credentials.kinds` says which variables and options a credential of a kind has;
- :mod:`~runs.credentials.replica_env` says what one attempt is given to open its rendezvous, which
  :mod:`~runs.credentials.sts` makes small and short-lived where the store can;
- :mod:`~runs.actions.credentials` stores, tests and deletes them for people.

Secrets travel as mappings of environment variables and never into the process's own environment:
several credentials are in use in one process at once.
"""

from runs.credentials.kinds import check_store
from runs.credentials.replica_env import Opened, replica_secrets, store_environment
from runs.credentials.vault import CannotOpen, open_credential

__all__ = [
    "CannotOpen",
    "Opened",
    "check_store",
    "open_credential",
    "replica_secrets",
    "store_environment",
]
