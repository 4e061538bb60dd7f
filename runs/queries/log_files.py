"""Log lines of a run as a file: all that match the filters, oldest first."""

from __future__ import annotations

import json
from collections.abc import Iterator

from runs.json_values import iso
from runs.models import Run
from runs.queries.selectors import lines_of, log_row

ROWS = 5000
CONTENT_TYPES = {"txt": "text/plain; charset=utf-8", "jsonl": "application/x-ndjson"}


def log_file(
    run: Run, format: str, *, replica: int | None = None, level: str = "", text: str = ""
) -> Iterator[bytes]:
    """Chunks of the file, read by key, so that a slow client keeps no cursor open.

    ``txt`` has one line per message, with its own line breaks indented; ``jsonl`` has the rows of
    the API.
    """
    lines = lines_of(run, replica=replica, search=text, least=level).order_by("id")
    last = 0
    while rows := list(lines.filter(id__gt=last)[:ROWS]):
        last = rows[-1].pk
        if format == "jsonl":
            texts = [json.dumps(log_row(line), ensure_ascii=False) for line in rows]
        else:
            texts = [
                f"{iso(line.at)} replica {line.replica.number} {line.level}: "
                + line.message.replace("\r", "").replace("\n", "\n    ")
                for line in rows
            ]
        yield "".join(f"{one}\n" for one in texts).encode("utf-8", "replace")
        if len(rows) < ROWS:
            return
