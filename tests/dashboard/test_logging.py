"""Log lines: text or JSON, both without secrets."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dashboard.logging import ContextFilter, JsonFormatter, config, configure_handlers
from runs import redaction
from runs.log_context import about, current
from runs.redaction import RedactingFormatter


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger with a readable buffer."""
    logger = logging.Logger("tests.lines", logging.INFO)
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    yield logger, written


def test_json_lines_have_time_message_and_context(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log
    configure_handlers(logger, "json")
    with about(run="r1"):
        with about(replica=3, round=0):
            logger.warning("late by %s s", 4)
        logger.info("seen", extra={"replica": 5})
    logger.info("elsewhere")
    late, seen, elsewhere = map(json.loads, written.getvalue().splitlines())
    assert late.pop("at").endswith("+00:00")
    assert late.pop("process")
    assert late == {
        "level": "warning",
        "logger": "tests.lines",
        "message": "late by 4 s",
        "run": "r1",
        "replica": 3,
        "round": 0,
    }
    assert (seen["run"], seen["replica"]) == ("r1", 5), "the fields of the call win"
    assert not {"run", "replica", "round"} & elsewhere.keys()


def test_a_traceback_is_one_line(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    configure_handlers(logger, "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed")
    (line,) = written.getvalue().splitlines()
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_both_formats_redact_secrets(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    redaction.remember(["hunter2-hunter2"])
    for format in ("text", "json"):
        configure_handlers(logger, format)
        try:
            raise ValueError("hunter2-hunter2")
        except ValueError:
            logger.exception("with %s", "hunter2-hunter2")
    assert "hunter2" not in written.getvalue()
    assert written.getvalue().count(redaction.STRUCK_OUT) >= 4


def test_text_handlers_keep_their_format(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    configure_handlers(logger, "text")
    configure_handlers(logger, "text")
    with about(run="r1"):
        logger.info("hello")
    assert written.getvalue() == "INFO hello\n"
    (handler,) = logger.handlers
    assert isinstance(handler.formatter, RedactingFormatter)
    assert len(handler.filters) == 1


def test_the_log_context_ends_with_the_task() -> None:
    with about(run="r1"):
        with pytest.raises(RuntimeError), about(round=2):
            assert dict(current()) == {"run": "r1", "round": 2}
            raise RuntimeError
        assert dict(current()) == {"run": "r1"}
    assert not current()


@pytest.mark.parametrize("format", ["text", "json"])
def test_django_accepts_the_logging_configuration(format: str) -> None:
    code = (
        "import logging, logging.config; from dashboard.logging import config;"
        f"logging.config.dictConfig(config(format={format!r}, level='INFO'));"
        "logging.getLogger('x').warning('hello')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        (json.loads(done.stderr)["message"] == "hello")
        if format == "json"
        else (done.stderr.endswith("WARNING x: hello\n"))
    )
    filters: Any = config(format=format, level="INFO")["handlers"]["console"]["filters"]
    assert filters == ["context"]
    assert ContextFilter().filter(logging.makeLogRecord({}))
    assert JsonFormatter().format(logging.makeLogRecord({"msg": "x"}))


@pytest.mark.django_db(transaction=True)
def test_events_are_logged_after_commit(caplog: pytest.LogCaptureFixture) -> None:
    from django.db import transaction

    from runs.transitions import record_event
    from tests.browser import seed

    run = seed.run(seed.user("olga", "operator"), committed=1)
    replica = run.replicas.get(number=2)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="runs.transitions"):
        with pytest.raises(RuntimeError), transaction.atomic():
            record_event(run, "x", "undone")
            raise RuntimeError
        with about(round=7):
            record_event(run, "x", "slow", level="warning", replica=replica)
        record_event(run, "run_state", "why", from_state="running", to_state="stalled")
    slow, moved = caplog.records
    result: Any = slow
    assert (result.run, result.replica, result.round) == (str(run.pk), 2, 7)
    assert slow.levelname == "WARNING"
    assert slow.getMessage() == f"run {run.pk}, replica 2: slow"
    assert moved.getMessage() == f"run {run.pk}: running -> stalled: why"
