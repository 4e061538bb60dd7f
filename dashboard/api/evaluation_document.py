"""An evaluation of checkpoints as a document: of a run, or in the document of a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from dashboard.api.types import NO_NUL, SMALL, Body
from diloco.protocol.evaluation import DATA_CHARS, MOST_TASKS, TOKENS
from runs.queries import named
from runs.submit.evaluation_plans import NAME_CHARS, spec_of
from runs.submit.run_draft import PlanDraft

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS, pattern=NO_NUL)]
Text = Annotated[str, Field(max_length=80, pattern=NO_NUL)]
Count = Annotated[int, Field(ge=0, le=SMALL)]


class EvaluationDocument(Body):
    """Measurement of a run's checkpoints: each ``every``-th and the final weights, 0: on request.
    ``data`` is the URI of token shards, by default the held-out data of the run. ``credential`` is
    the name of a credential of the backend, by default the server's environment."""

    model_config = ConfigDict(title="Evaluation document")

    name: Name
    data: Annotated[str, Field(max_length=DATA_CHARS, pattern=NO_NUL)] = ""
    tokens: Count = TOKENS
    tasks: Annotated[list[Text], Field(max_length=MOST_TASKS)] = Field(default_factory=list)
    examples: Count = 0
    every: Count = 1
    backend: Annotated[str, Field(max_length=32, pattern=NO_NUL)] = "local"
    hardware: Annotated[str, Field(max_length=64, pattern=NO_NUL)] = "cpu"
    credential: Text = ""
    timeout_s: Count = 3600
    max_attempts: Count = 3


def plan_draft(document: EvaluationDocument) -> PlanDraft:
    """The draft of a document. Raises :class:`~runs.exceptions.InvalidRun` for a wrong field."""
    values = document.model_dump()
    spec = spec_of(
        data=values.pop("data"),
        tokens=values.pop("tokens"),
        tasks=tuple(values.pop("tasks")),
        examples=values.pop("examples"),
    )
    values["credential"] = named.credential_id(document.credential, document.backend, "credential")
    return PlanDraft(spec=spec, **values)


def plan_document(draft: PlanDraft, names: Mapping[int | None, str]) -> dict[str, Any]:
    """The inverse of :func:`plan_draft`; ``names`` are those of credentials by id."""
    return draft.to_dict() | {"credential": names.get(draft.credential, "")}
