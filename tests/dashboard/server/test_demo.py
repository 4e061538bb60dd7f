"""The demo command with a simulated server and run; ``test_supervisor.py`` and ``tests/e2e`` use
real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.utils import timezone

from dashboard.management.commands import demo
from dashboard.server.supervisor import SupervisorError
from runs.models import Run
from runs.states import RunState

pytestmark = pytest.mark.django_db


class FakeServer:
    """Performs one scripted action per wait, and is stopped when none is left."""

    address = "http://127.0.0.1:8000/"
    var = Path("/state")

    def __init__(self, acts: list[Callable[[], Any]]) -> None:
        self.acts = acts
        self.stopping = False
        self.left = False

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.left = True

    def start(self) -> None: ...

    def wait(self, seconds: float = 0.2) -> None:
        if self.acts:
            self.acts.pop(0)()
        else:
            self.stopping = True


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeServer]:
    def play(*acts: Callable[[], Any]) -> FakeServer:
        server = FakeServer(list(acts))
        monkeypatch.setattr(demo, "supervisor", lambda options, report: server)
        return server

    return play


def end(state: RunState, reason: str = "", **values: Any) -> Callable[[], Any]:
    def act() -> None:
        newest = Run.objects.order_by("-created_at")[:1].values("pk")
        Run.objects.filter(pk__in=list(newest.values_list("pk", flat=True))).update(
            state=state, state_reason=reason, ended_at=timezone.now(), **values
        )

    return act


def test_options_shorten_the_run(play: Callable[..., FakeServer]) -> None:
    play(end(RunState.SUCCEEDED))
    call_command("demo", "--exit", "--rounds", "2", "--steps", "5")
    play(end(RunState.SUCCEEDED))
    call_command("demo", "--exit", "--steps", "7")
    shapes = [
        tuple(run.group_settings[name] for name in ("total_rounds", "sync_every", "warmup_steps"))
        for run in Run.objects.order_by("created_at")
    ]
    assert shapes == [(2, 5, 1), (16, 7, 1)]


def test_a_successful_run_exits_with_status_0(
    play: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = play(lambda: None, end(RunState.SUCCEEDED, eval_loss=1.5, committed_rounds=16))
    call_command("demo", "--exit")
    output = capsys.readouterr().out
    run = Run.objects.get()
    assert server.left and not server.stopping
    assert f"watch the run at http://127.0.0.1:8000/runs/{run.pk}/" in output
    assert "1.500 nats per byte" in output
    assert f"diloco.generate {run.rendezvous}" in output


def test_a_failed_run_exits_with_status_1_and_the_reason(
    play: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    play(end(RunState.FAILED, "every replica ended with an error"))
    with pytest.raises(SystemExit) as left:
        call_command("demo", "--exit")
    assert left.value.code == 1
    assert "run failed: every replica ended with an error" in capsys.readouterr().out


def test_an_interrupt_exits_with_status_1(play: Callable[..., FakeServer]) -> None:
    play()
    with pytest.raises(SystemExit) as left:
        call_command("demo", "--exit")
    assert left.value.code == 1


def test_without_exit_the_server_keeps_running(
    play: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = play(end(RunState.FAILED), lambda: None, lambda: None)
    call_command("demo")
    assert server.stopping and not server.acts
    assert "still serving http://127.0.0.1:8000/" in capsys.readouterr().out


def test_the_password_is_shown_once_and_not_stored(
    play: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    play()
    call_command("demo")
    output = capsys.readouterr().out
    password = output.split("with password ")[1].split()[0]
    user = User.objects.get(username="demo")
    assert user.check_password(password) and password not in user.password
    assert user.is_superuser
    play()
    call_command("demo")
    assert password not in capsys.readouterr().out
    assert User.objects.get(username="demo").check_password(password)


def test_an_unfinished_demo_run_is_stopped_first(play: Callable[..., FakeServer]) -> None:
    play()
    call_command("demo")
    first = Run.objects.get()
    play()
    call_command("demo")
    first.refresh_from_db()
    assert first.state == RunState.STOPPING
    assert Run.objects.exclude(pk=first.pk).get().state == RunState.QUEUED


def test_a_start_failure_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(options: Any, report: Any) -> None:
        raise SupervisorError("port 8000 on 127.0.0.1 is in use")

    monkeypatch.setattr(demo, "supervisor", refuse)
    with pytest.raises(SystemExit) as left:
        call_command("demo")
    assert left.value.code == "archipelago: port 8000 on 127.0.0.1 is in use"
