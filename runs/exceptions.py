"""Exceptions of the domain: one type for each reaction of the caller."""

from __future__ import annotations

from executors.base import Problem


class InvalidRun(ValueError):
    """A draft cannot become a run.

    ``field`` is the form field that the message belongs to, or '': the name of a group setting,
    ``pools``, ``name``, ``rendezvous``, ``data``, ``time_limit_s`` or ``submit_key``. ``others``
    are further problems.
    """

    def __init__(self, field: str, message: str, *others: Problem) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message
        self.problems = (Problem(field=field, message=message), *others)


class IllegalTransition(ValueError):
    """The state tables do not contain this transition: a bug, or a request that came too late."""

    def __init__(self, subject: str, found: str, wanted: str) -> None:
        super().__init__(f"{subject} is {found} and cannot become {wanted}")
        self.found = found
        self.wanted = wanted


class ActionRefused(ValueError):
    """A user's request cannot be carried out; the message explains the reason to the user."""


class LaunchFailed(Exception):
    """The run cannot be launched until the operator changes something."""


class LaunchLater(Exception):
    """The run could not be launched now; a retry can succeed."""
