"""Errors of a replica, one type per distinct reaction."""

from __future__ import annotations

from enum import StrEnum


def install_extra(name: str) -> str:
    """Return how to install an extra of the library, for messages. pip takes the requirements of
    the extra from the installed package."""
    return f"run pip install 'archipelago-diloco[{name}]'"


def without_module(error: ModuleNotFoundError, extra: str, *, caller: str) -> BaseException:
    """Return the exception for a command that needs a missing module: its end with one line, or
    where ``caller``, the module's ``__name__``, is not run as a command, an error."""
    message = f"expected {error.name}, found none; {install_extra(extra)}"
    if caller == "__main__":
        return SystemExit(f"error: {message}")
    return ModuleNotFoundError(message, name=error.name)


class ReplicaError(Exception):
    """The replica cannot continue, and a restart would not help. The message is shown to users."""


class ModelMismatch(ReplicaError):
    """The local model differs from the model that the group trains."""


class SettingsMismatch(ReplicaError):
    """The group has other settings than the ones given to ``join``."""


class GroupExists(ReplicaError):
    """The rendezvous has a group already, where a new run was required."""


class DamagedObject(ReplicaError):
    """An object does not match its manifest, however often it is read."""


class FencedOut(ReplicaError):
    """A newer process of the same replica has started; this one must not write any more."""


class RoundTimeout(ReplicaError):
    """An exchange took longer than the group's ``round_timeout_s``."""


class StopReason(StrEnum):
    """Why a replica's training ends. The values are those of ``final/manifest.json``."""

    COMPLETED = "completed"
    """The group has committed all rounds."""
    TOKEN_LIMIT = "token_limit"  # noqa: S105
    """The group has committed ``max_tokens`` tokens."""
    STOPPED = "stopped"
    """A ``stop`` command ended the run."""
    LEFT = "left"
    """This replica leaves the group; the run continues."""
    CLOSED = "closed"
    """The round loop is closed; ends the exchanges in the background. Never published."""

    @classmethod
    def of(cls, value: str) -> StopReason:
        """Parse the reason of a result; one of a later version counts as completed."""
        return cls(value) if value in set(cls) else cls.COMPLETED


class StopTraining(Exception):
    """Control flow, not an error: training ends for ``reason``; unwinds to the main loop."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class RunOver(Exception):
    """Control flow, not an error: an earlier round was the last, so this round does not happen."""
