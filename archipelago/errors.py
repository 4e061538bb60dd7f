"""Errors of the client: one type per distinct reaction, each with its exit status.

Exit status 1 is a run that did not succeed, 2 a command line that could not be parsed (argparse),
130 Ctrl-C.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FieldProblem:
    """``field`` is a path in the document, such as ``pools.0.hardware``."""

    field: str
    message: str
    expected: str | None = None
    found: str | None = None


class ApiError(Exception):
    """The server rejected the request, or an unexpected error. ``status`` is the HTTP status, 0 if
    there was no response."""

    exit_code = 9

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(ApiError):
    """The server did not respond. A retry can succeed."""

    exit_code = 3


class LoginNeeded(ApiError):
    """No token, or a token that the server rejects."""

    exit_code = 4


class Refused(ApiError):
    """The scopes of the token, or the role of its owner, do not allow the request."""

    exit_code = 4


class NotFound(ApiError):
    exit_code = 5


class Invalid(ApiError):
    """The request is invalid; ``problems`` lists the fields."""

    exit_code = 6

    def __init__(
        self, message: str, *, status: int = 422, problems: tuple[FieldProblem, ...] = ()
    ) -> None:
        super().__init__(message, status=status)
        self.problems = problems


class Conflict(ApiError):
    """The state of the run or the replica does not allow the action."""

    exit_code = 7
