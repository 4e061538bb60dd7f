"""Parameters with their bounds: what a database column holds, and text it takes."""

from typing import Annotated, Any
from uuid import UUID

from ninja import Path, Query
from pydantic import Field

from dashboard.api.problems import Problem

NO_NUL = r"^[^\x00]*$"
SMALL, LARGE = 2**31 - 1, 2**53

RunId = Annotated[UUID, Path(description="The run's id")]
Number = Annotated[int, Path(ge=0, le=SMALL, description="The replica's number in its run")]
PoolId = Annotated[int, Path(ge=0, le=SMALL)]
After = Annotated[int, Query(ge=0, le=LARGE, description="Only what came after this id")]
OfReplica = Annotated[int | None, Query(ge=0, le=SMALL, description="Of this replica only")]
Words = Annotated[str, Field(pattern=NO_NUL)]


def responses(found: Any, *, status: int = 200, but: tuple[int, ...] = ()) -> dict[int, Any]:
    """What an operation answers with: its own, and what is wrong otherwise."""
    refusals = {400, 401, 403, 404, 409, 413, 422} - set(but)
    return {status: found, **dict.fromkeys(sorted(refusals), Problem)}
