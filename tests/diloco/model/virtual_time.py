"""Threads in virtual time: one runs at a time, a seed selects which, and waiting takes no real
time.

Each thread of the code under test is a greenlet. It runs until it waits for time, for another
thread, or at a store operation. Then the :class:`Scheduler` selects one of the ready tasks; if
there is none, it advances the clock to the earliest deadline. A run is therefore a function of its
seed, on any machine and under any load.

The module also has the parts of ``threading`` and ``concurrent.futures`` that the replica library
uses, under the same names.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import greenlet

EPOCH_S = 1_700_000_000.0


class Killed(BaseException):
    """Raised in every thread of a killed process; no handler of the library catches it."""


class Hang(AssertionError):
    """Every thread waits for another one, or virtual time is over."""


@dataclass(eq=False)
class Process:
    """A group of threads that are killed together."""

    name: str
    dead: bool = False


@dataclass(eq=False)
class Task:
    """One thread. It is ready if ``ready`` returns True or ``wake_s`` has passed."""

    name: str
    process: Process | None
    run: greenlet.greenlet = field(init=False)
    ready: Callable[[], bool] = bool
    wake_s: float = 0.0
    done: bool = False


class Scheduler:
    """Runs tasks one at a time; also the clock of the whole run."""

    def __init__(self, rng: random.Random) -> None:
        self.now_s = 1000.0
        self.switches = 0
        self._rng = rng
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._main = greenlet.getcurrent()

    # -- the clock -------------------------------------------------------------------------------

    def wall(self) -> float:
        return EPOCH_S + self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, max(0.0, seconds))

    # -- tasks -----------------------------------------------------------------------------------

    @property
    def process(self) -> Process | None:
        """The process of the running thread."""
        return self._current.process if self._current else None

    def spawn(self, name: str, work: Callable[[], object], process: Process | None = None) -> Task:
        task = Task(name, process if process is not None else self.process)

        def body() -> None:
            with contextlib.suppress(Killed, greenlet.GreenletExit):
                work()
            task.done = True

        task.run = greenlet.greenlet(body, parent=self._main)
        task.wake_s = self.now_s
        self._tasks.append(task)
        return task

    def block(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``ready()`` or for the given time; return whether it is ready."""
        task = self._current
        assert task is not None, "only a task can wait"
        self._die_if_killed(task)
        task.ready = ready
        task.wake_s = float("inf") if timeout_s is None else self.now_s + timeout_s
        self._main.switch()
        self._die_if_killed(task)
        return ready()

    def kill(self, process: Process) -> None:
        """End all threads of a process at their current position."""
        process.dead = True

    @staticmethod
    def _die_if_killed(task: Task) -> None:
        if task.process is not None and task.process.dead:
            raise Killed

    def run(self, *, until: Callable[[], bool], deadline_s: float) -> None:
        """Run tasks until ``until()``. Raises :class:`Hang` at ``deadline_s``."""
        while not until():
            self._tasks = [task for task in self._tasks if not task.done]
            able = [
                task
                for task in self._tasks
                if task.wake_s <= self.now_s
                or task.ready()
                or (task.process is not None and task.process.dead)
            ]
            if able:
                self._switch_to(self._rng.choice(able))
                continue
            next_s = min((task.wake_s for task in self._tasks), default=float("inf"))
            if next_s > deadline_s:
                waiting = ", ".join(task.name for task in self._tasks)
                raise Hang(f"nothing happens until {deadline_s:g} s; waiting: {waiting}")
            self.now_s = next_s

    def _switch_to(self, task: Task) -> None:
        self.switches += 1
        self._current = task
        try:
            task.run.switch()
        finally:
            self._current = None

    def close(self) -> None:
        """End all running tasks."""
        for task in self._tasks:
            if task.process is None:
                task.process = Process("closing")
            task.process.dead = True
        for task in self._tasks:
            for _ in range(1000):
                if task.done or task.run.dead:
                    break
                self._switch_to(task)


# -- the names that the library uses ---------------------------------------------------------------

_ACTIVE: list[Scheduler] = []


def active() -> Scheduler:
    """Return the scheduler of the current run; there is one at a time."""
    return _ACTIVE[-1]


@contextlib.contextmanager
def activated(scheduler: Scheduler) -> Iterator[None]:
    """Use this scheduler's time for the classes below."""
    _ACTIVE.append(scheduler)
    try:
        yield
    finally:
        _ACTIVE.pop()


class Thread:
    def __init__(
        self, *, target: Callable[[], object], name: str = "", daemon: bool = False
    ) -> None:
        self._target, self._name = target, name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = active().spawn(self._name, self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        active().block(lambda: not self.is_alive(), timeout)


class Event:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            active().block(lambda: self._set, timeout)
        return self._set


class Lock:
    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> bool:
        if self._held:
            active().block(lambda: not self._held)
        self._held = True
        return True

    def __exit__(self, *error: object) -> None:
        self._held = False


class Future:
    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done

    def _await(self) -> None:
        if not self._done:
            active().block(lambda: self._done)

    def result(self) -> Any:
        self._await()
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self) -> BaseException | None:
        self._await()
        return self._error

    def run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:
            self._error = error
            if isinstance(error, Killed | greenlet.GreenletExit):
                raise
        finally:
            self._done = True

    def cancel(self) -> None:
        self._error, self._done = CancelledError(), True


class CancelledError(Exception):
    """The future never ran."""


class ThreadPoolExecutor:
    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._room, self._name = max_workers, thread_name_prefix
        self._waiting: list[tuple[Future, Callable[[], Any]]] = []
        self._running = 0

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        future = Future()
        self._waiting.append((future, lambda: work(*arguments)))
        self._fill()
        return future

    def _fill(self) -> None:
        while self._waiting and self._running < self._room:
            future, work = self._waiting.pop(0)
            self._running += 1
            active().spawn(self._name, lambda f=future, w=work: self._work(f, w))

    def _work(self, future: Future, work: Callable[[], Any]) -> None:
        try:
            future.run(work)
        finally:
            self._running -= 1
            self._fill()

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(work, item) for item in items]
        return iter([future.result() for future in futures])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
        if wait and self._running:
            active().block(lambda: not self._running)

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def call_in_daemon(work: Callable[[], Any], *, name: str) -> Future:
    """Like :func:`diloco.store.daemon.call_in_daemon`."""
    future = Future()
    active().spawn(name, lambda: future.run(work))
    return future


def wait(futures: Collection[Future], timeout: float | None = None) -> SimpleNamespace:
    """Like ``concurrent.futures.wait``."""

    def everything() -> bool:
        return all(future.done() for future in futures)

    if not everything():
        active().block(everything, timeout)
    done = {future for future in futures if future.done()}
    return SimpleNamespace(done=done, not_done={*futures} - done)


threading = SimpleNamespace(Thread=Thread, Event=Event, Lock=Lock, get_ident=lambda: 0)
"""The part of ``threading`` that the library uses."""
