"""The runner of emulated jobs, with real processes. Tests wait for events."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulators.processes import Job, Processes
from tests.executors.harnesses import LIMIT_S, is_gone, number_in, wait_for

pytestmark = pytest.mark.processes

WAIT = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path / "jobs", grace_s=30)
    yield made
    made.close()


def python(processes: Processes, code: str, **more: object) -> Job:
    return processes.start(["python", "-u", "-c", code], {}, **more)  # type: ignore[arg-type]


def end_of(processes: Processes, job: Job) -> Job:
    while job.state != "ended":
        changed = processes.wait_change(job.id, LIMIT_S, after=job.changes)
        assert changed.changes > job.changes, f"nothing happened to {job}"
        job = changed
    return job


def first_line(processes: Processes, job: Job) -> str:
    while not processes.log_lines(job.id):
        job = processes.wait_change(job.id, LIMIT_S, after=processes.get(job.id).changes)
        assert job.state != "ended" or processes.log_lines(job.id)
    return processes.log_lines(job.id)[0][2]


def test_a_job_has_a_separate_machine(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_SECRET", "secret")
    code = "import os, sys; print(sorted(os.environ)); print(os.getcwd()); print(sys.executable)"
    job = end_of(processes, processes.start(["python", "-c", code], {"GIVEN": "x"}, job_id="own"))
    names, folder, interpreter = (text for _, _, text in processes.log_lines("own"))
    assert "GIVEN" in names and "PATH" in names and "OUR_SECRET" not in names
    assert folder == str(processes.root / "own")
    assert interpreter == sys.executable
    assert (job.exit_code, job.signal, job.ended_by) == (0, 0, "")
    assert 0 < job.created_wall_s <= job.started_wall_s <= job.ended_wall_s


def test_python_in_a_shell_is_this_interpreter(processes: Processes) -> None:
    job = processes.start(["sh", "-c", "python -c 'import sys; print(sys.executable)'"], {})
    end_of(processes, job)
    assert processes.log_lines(job.id)[0][2] == sys.executable


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [("raise SystemExit(75)", 75, 0), ("import os; os.kill(os.getpid(), 11)", 139, 11)],
)
def test_exit_codes_are_those_of_a_container_runtime(
    processes: Processes, code: str, exit_code: int, number: int
) -> None:
    job = end_of(processes, python(processes, code))
    assert (job.exit_code, job.signal, job.ended_by) == (exit_code, number, "")


def test_a_missing_command_exits_with_127(processes: Processes) -> None:
    job = end_of(processes, processes.start(["no-such-program"], {}))
    assert job.exit_code == 127
    assert "no-such-program: No such file" in processes.log_lines(job.id)[0][2]


def test_lines_are_numbered_and_dated(processes: Processes) -> None:
    job = end_of(
        processes, python(processes, "print('a'); print(); print('ü'); print(end='no end')")
    )
    lines = processes.log_lines(job.id)
    assert [(n, text) for n, _, text in lines] == [(1, "a"), (2, ""), (3, "ü"), (4, "no end")]
    times = [wall_s for _, wall_s, _ in lines]
    assert times == sorted(times) and job.started_wall_s <= times[0] <= job.ended_wall_s
    assert processes.log_lines(job.id, after=2) == lines[2:]
    assert processes.log_lines(job.id, after=4) == processes.log_lines(job.id, after=9) == []


def test_a_job_can_handle_sigterm(processes: Processes) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); {WAIT}"
    job = python(processes, f"import sys; {code}")
    first_line(processes, job)
    processes.kill(job.id, "preempted")
    ended = end_of(processes, job)
    assert (ended.exit_code, ended.signal, ended.ended_by) == (143, 0, "preempted")


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace_period(
    processes: Processes,
) -> None:
    job = python(processes, DEAF, grace_s=0.1)
    first_line(processes, job)
    processes.kill(job.id, "preempted")
    processes.kill(job.id, "cancelled")
    ended = end_of(processes, job)
    assert (ended.exit_code, ended.signal, ended.ended_by) == (137, 9, "preempted")
    processes.kill(job.id, "oom")
    assert processes.get(job.id) == ended


def test_a_timeout_ends_the_job(processes: Processes) -> None:
    job = end_of(processes, python(processes, WAIT, timeout_s=0.2))
    assert (job.ended_by, job.exit_code) == ("deadline", 143)
    in_time = end_of(processes, python(processes, "", timeout_s=600))
    assert (in_time.ended_by, in_time.exit_code) == ("", 0)


def test_a_held_job_is_pending_until_begin(processes: Processes) -> None:
    job = python(processes, "print('begun')", held=True)
    assert (job.state, processes.log_lines(job.id)) == ("pending", [])
    processes.begin(job.id)
    assert processes.begin(job.id).state != "pending"  # twice starts it once
    end_of(processes, job)
    assert len(processes.log_lines(job.id)) == 1
    other = python(processes, "print('begun')", held=True)
    processes.kill(other.id)
    ended = processes.get(other.id)
    assert (ended.state, ended.exit_code, ended.ended_by) == ("ended", None, "cancelled")
    assert processes.begin(other.id).state == "ended"


def test_remaining_processes_of_a_job_are_killed(processes: Processes, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'inner')!r}, 'w').write(str(inner.pid))"
    )
    end_of(processes, python(processes, code))
    wait_for(lambda: is_gone(number_in(tmp_path / "inner")), "the job's own child to end")


def test_an_id_is_used_once_and_unknown_ones_are_errors(processes: Processes) -> None:
    end_of(processes, python(processes, "", job_id="one"))
    with pytest.raises(ValueError, match="one"):
        python(processes, "", job_id="one")
    for call in (processes.get, processes.log_lines, processes.kill, processes.begin):
        with pytest.raises(KeyError):
            call("two")
    assert [job.id for job in processes.all()] == ["one"]


def test_a_deleted_job_is_killed_and_waiters_return(
    processes: Processes,
) -> None:
    job = python(processes, WAIT, timeout_s=600)
    pid = int(first_line(processes, job))
    waiting = threading.Thread(target=lambda: processes.wait_change(job.id, LIMIT_S, after=10**9))
    waiting.start()
    processes.forget(job.id)
    waiting.join(LIMIT_S / 2)
    assert not waiting.is_alive()
    assert is_gone(pid)
    assert processes.all() == []


def test_closing_kills_running_jobs(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    pids = [int(first_line(processes, python(processes, DEAF))) for _ in range(3)]
    processes.close()
    assert all(is_gone(pid) for pid in pids)
    assert {job.exit_code for job in processes.all()} == {137}


def test_a_job_outlives_the_thread_that_started_it(processes: Processes) -> None:
    jobs: list[Job] = []
    thread = threading.Thread(target=lambda: jobs.append(python(processes, WAIT)))
    thread.start()
    thread.join()
    os.kill(int(first_line(processes, jobs[0])), 0)
    assert processes.get(jobs[0].id).state == "running"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is specific to Linux"
)
def test_jobs_of_a_killed_emulator_die(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.emulators.processes import Processes\n"
        "p = Processes(Path(sys.argv[1])); job = p.start(['python', '-c', sys.argv[2]], {})\n"
        "time.sleep(600)"
    )
    job = f"import os, time; open({str(tmp_path / 'up')!r}, 'w').write(str(os.getpid())); {WAIT}"
    emulator = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, job], cwd=Path(__file__).parents[2]
    )
    pid = number_in(tmp_path / "up")
    os.kill(emulator.pid, signal.SIGKILL)
    emulator.wait()
    wait_for(lambda: is_gone(pid), "the job to die")
