"""What can go wrong for a replica, one type per distinct reaction."""

from __future__ import annotations


class ReplicaError(Exception):
    """The replica cannot go on; starting it again would not help. The message is for people."""


class ModelMismatch(ReplicaError):
    """The model built here is not the one the group trains."""


class DamagedObject(ReplicaError):
    """An object that a manifest names is not what the manifest says, however often it is read."""


class FencedOut(ReplicaError):
    """A newer process of the same replica has started; this one must not write any more."""


class RoundTimeout(ReplicaError):
    """An exchange took longer than the group's ``round_timeout_s``."""


class Leaving(Exception):
    """Not an error: the replica was asked to stop, and unwinds to its main loop."""


class RunOver(Exception):
    """Not an error: an earlier round turned out to be the last, so this one will not be."""
