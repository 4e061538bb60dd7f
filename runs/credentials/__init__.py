"""Credentials of backends and buckets: encrypted in the database, decrypted only for use.

- :mod:`~runs.credentials.vault` encrypts and decrypts them.
- :mod:`~runs.credentials.kinds` defines the variables and options of each kind.
- :mod:`~runs.credentials.replica_env` selects the secrets of one attempt. If the store supports it,
  :mod:`~runs.credentials.sts` issues temporary keys that are limited to the run's prefix.
- :mod:`~runs.credentials.restrictions` limits the options that pools can set.
- :mod:`~runs.actions.credentials` stores, tests and deletes credentials for users.

Secrets are passed as mappings of environment variables and never put into the process's own
environment, because one process uses several credentials at once.
"""

from runs.credentials.kinds import check_store
from runs.credentials.replica_env import (
    Opened,
    job_secrets,
    replica_secrets,
    store_environment,
)
from runs.credentials.vault import DecryptionError, open_credential

__all__ = [
    "DecryptionError",
    "Opened",
    "check_store",
    "job_secrets",
    "open_credential",
    "replica_secrets",
    "store_environment",
]
