"""The command line that does what the submit form would do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dashboard.presentation.changes import sets_of
from runs.submit.changes import FieldChange


def submit_command(document: str, sweep: Sequence[str] = ()) -> str:
    """Submit a document from standard input; with ``sweep`` as a sweep with these arguments."""
    command = shlex.join(
        ["archipelago", "sweep", "-", *sweep] if sweep else ["archipelago", "submit", "-"]
    )
    return f"{command} <<'JSON'\n{document}\nJSON"


def clone_command(
    run: str, name: str, changes: Sequence[FieldChange], sweep: Sequence[str] = ()
) -> str:
    words = ["archipelago", "clone", run, "--name", name]
    words += [word for each in sets_of(changes) for word in ("--set", each)]
    return shlex.join([*words, *sweep])
