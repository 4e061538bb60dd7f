"""What can go wrong, one type for each thing a person does about it, and the status a shell gets.

Status 1 is a run that did not succeed, 2 a command that was not understood (argparse's own), and
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
    """The server said no, or something nobody foresaw. ``status`` is HTTP's; 0: no answer."""

    exit_code = 9

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(ApiError):
    """No answer; trying again may help."""

    exit_code = 3


class LoginNeeded(ApiError):
    """No token, or one that the server does not take."""

    exit_code = 4


class Refused(ApiError):
    """The token's scope, or its owner's role, is not enough."""

    exit_code = 4


class NotFound(ApiError):
    exit_code = 5


class Invalid(ApiError):
    """What was sent is wrong; ``problems`` say where."""

    exit_code = 6

    def __init__(
        self, message: str, *, status: int = 422, problems: tuple[FieldProblem, ...] = ()
    ) -> None:
        super().__init__(message, status=status)
        self.problems = problems


class Conflict(ApiError):
    """It cannot be done in the state the run or the replica is in."""

    exit_code = 7
