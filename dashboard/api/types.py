"""Types of parameters and bodies. Their bounds are those of the database columns."""

from typing import Annotated, Any
from uuid import UUID

from ninja import Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict

from dashboard.api.problems import Problem
from runs.models import Replica, Run
from runs.queries import search

NO_NUL = r"^[^\x00]*$"
SMALL, LARGE = 2**31 - 1, 2**53

RunId = Annotated[UUID, Path(description="The run's id")]
Number = Annotated[int, Path(ge=0, le=SMALL, description="The replica's number in its run")]
RowId = Annotated[int, Path(ge=0, le=SMALL)]
After = Annotated[int, Query(ge=0, le=LARGE, description="Only rows with an id above this one")]
OfOwner = Annotated[str, Query(max_length=150, pattern=NO_NUL)]
OnBackend = Annotated[str, Query(max_length=32, pattern=NO_NUL)]
SearchQuery = Annotated[
    str, Query(max_length=search.LONGEST, pattern=NO_NUL, description="Search query")
]
OfReplica = Annotated[int | None, Query(ge=0, le=SMALL, description="Only of this replica")]


class Body(BaseModel):
    """The body of a request: values are not converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _not_a_number(value: object) -> object:
    if value is None or (isinstance(value, str) and not value.replace(".", "").isdecimal()):
        return value
    raise ValueError(f"expected a time such as 2026-01-31T12:00:00Z, found {str(value)[:40]}")


IsoTime = BeforeValidator(_not_a_number)
"""Refuse a number, which pydantic would convert to a time."""


def responses(success: Any, *, status: int = 200, but: tuple[int, ...] = ()) -> dict[int, Any]:
    """Response types of an operation: ``found`` for success, and all error statuses except
    ``but``."""
    refusals = {400, 401, 403, 404, 409, 413, 422} - set(but)
    return {status: success, **dict.fromkeys(sorted(refusals), Problem)}


def done(row: Run | Replica, changed: bool) -> dict[str, Any]:
    """The answer of an action on a run or replica."""
    row.refresh_from_db()
    return {"changed": changed, "state": row.state}
