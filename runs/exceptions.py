"""What the domain raises: one type per distinct reaction of the caller."""

from __future__ import annotations


class InvalidRun(ValueError):
    """A draft cannot become a run. ``field`` is the form field the message belongs to, or ''.

    Settings keep their own names; pools are ``pools``; the rest are ``name``, ``rendezvous``,
    ``data``, ``time_limit_s``, ``submit_key``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class IllegalTransition(ValueError):
    """The state tables do not know this transition; a bug or a request that came too late."""

    def __init__(self, what: str, found: str, wanted: str) -> None:
        super().__init__(f"{what} is {found} and cannot become {wanted}")
        self.found = found
        self.wanted = wanted


class CannotDo(ValueError):
    """What somebody asked of a run does not go; the message says why, to them."""


class LaunchFailed(Exception):
    """The run cannot be launched until a person changes something."""


class LaunchLater(Exception):
    """The run could not be launched now; trying again can help."""
