from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest

from dashboard.presentation.progress import Progress, clock, progress_line

NOW = datetime(2026, 1, 1, 12, 1, 23, tzinfo=UTC)


def header(**changes: Any) -> dict[str, Any]:
    return {
        "state": "running",
        "committed_rounds": 5,
        "total_rounds": 16,
        "train_loss": 2.9123,
        "eval_loss": None,
        "tokens_per_s": 12_345.6,
        "live": 3,
        "target": 4,
        "created_at": "2026-01-01T12:00:00+00:00",
        "ended_at": None,
        **changes,
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_has_all_figures_and_dashes_for_unknown_ones() -> None:
    assert progress_line(header(), now=NOW) == (
        "running 1:23  round 5/16  loss 2.912  eval –  12,346 tokens/s  replicas 3/4"
    )


def test_the_clock_of_an_ended_run_stops() -> None:
    ended = header(ended_at="2026-01-01T12:00:40+00:00", tokens_per_s=None)
    line = progress_line(ended, now=NOW)
    assert line.startswith("running 0:40  ") and "– tokens/s" in line


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_log_gets_a_line_per_round_and_state() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for rounds, state in [(5, "running"), (5, "running"), (6, "running"), (6, "succeeded")]:
        progress.show(header(committed_rounds=rounds, state=state), now=NOW)
    progress.finish()
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["running 1:23", "round 5/16"],
        ["running 1:23", "round 6/16"],
        ["succeeded 1:23", "round 6/16"],
    ]


def test_a_terminal_gets_one_updated_line() -> None:
    out = Terminal()
    progress = Progress(out)
    progress.show(header(), now=NOW)
    progress.show(header(committed_rounds=6), now=NOW)
    assert "\n" not in out.getvalue()
    progress.log("a word in between")
    assert out.getvalue().endswith("\r\x1b[Ka word in between\n")
    progress.finish()
    assert out.getvalue().count("\n") == 1


def test_only_warnings_and_errors_are_printed() -> None:
    out = io.StringIO()
    Progress(out).events(
        [
            {"level": "info", "replica": 1, "message": "quiet"},
            {"level": "warning", "replica": 2, "message": "lost"},
            {"level": "error", "replica": None, "message": "out of replicas"},
        ]
    )
    assert out.getvalue() == "warning: replica 2: lost\nerror: out of replicas\n"


def test_a_closed_terminal_is_ignored() -> None:
    class Closed(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    progress = Progress(Closed())
    progress.show(header(), now=NOW)
    progress.log("unheard")
    progress.finish()
