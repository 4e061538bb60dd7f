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
import heapq
import itertools
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
    """One thread, the ``number``-th of its scheduler. It is ready if ``ready`` returns True or the
    time of its last wait, the ``waits``-th, is over. ``ended`` are the tasks that join it."""

    name: str
    process: Process | None
    number: int
    run: greenlet.greenlet = field(init=False)
    ready: Callable[[], bool] = bool
    waits: int = 0
    done: bool = False
    ended: Waiters = field(default_factory=set)


Waiters = set[Task]
"""The tasks that wait for a change of one object. After a change the scheduler evaluates their
conditions (:meth:`Scheduler.changed`), and at no other time."""


class Scheduler:
    """Runs tasks one at a time; also the clock of the whole run."""

    def __init__(self, rng: random.Random) -> None:
        self.now_s = 1000.0
        self.switches = 0
        self._rng = rng
        self._numbers = itertools.count()
        self._tasks: dict[int, Task] = {}
        """The tasks that are not done, by number."""
        self._sleeping: list[tuple[float, int, int]] = []
        """A heap of times, with the task and the wait that each one ends."""
        self._due: Waiters = set()
        self._changed: Waiters = set()
        self._current: Task | None = None
        self._main = greenlet.getcurrent()

    # -- the clock -------------------------------------------------------------------------------

    def wall(self) -> float:
        return EPOCH_S + self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.block(bool, max(0.0, seconds))

    # -- tasks -----------------------------------------------------------------------------------

    def works_for(self, process: Process) -> bool:
        """Return whether a thread of a process has not ended."""
        return any(task.process is process for task in self._tasks.values())

    @property
    def process(self) -> Process | None:
        """The process of the running thread."""
        return self._current.process if self._current else None

    def spawn(self, name: str, work: Callable[[], object], process: Process | None = None) -> Task:
        owner = process if process is not None else self.process
        task = Task(name, owner, next(self._numbers))

        def body() -> None:
            with contextlib.suppress(Killed, greenlet.GreenletExit):
                work()
            task.done = True
            self.changed(task.ended)

        task.run = greenlet.greenlet(body, parent=self._main)
        self._tasks[task.number] = task
        self._due.add(task)
        return task

    def block(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        on: Iterable[Waiters] = (),
    ) -> bool:
        """Wait until ``ready()``, which a change of one of the objects ``on`` makes true, or for
        the given time; return whether it is ready."""
        task = self._current
        assert task is not None, "only a task can wait"
        self._die_if_killed(task)
        task.ready = ready
        task.waits += 1
        if timeout_s is not None:
            wait = (self.now_s + timeout_s, task.number, task.waits)
            heapq.heappush(self._sleeping, wait)
        waiters = [*on]
        for each in waiters:
            each.add(task)
        self._main.switch()
        for each in waiters:
            each.discard(task)
        self._die_if_killed(task)
        return ready()

    def changed(self, waiters: Waiters) -> None:
        """Evaluate the conditions of these tasks before the next one runs."""
        self._changed |= waiters

    def kill(self, process: Process) -> None:
        """End all threads of a process at their current position."""
        process.dead = True
        self._due.update(task for task in self._tasks.values() if task.process is process)

    @staticmethod
    def _die_if_killed(task: Task) -> None:
        if task.process is not None and task.process.dead:
            raise Killed

    def run(self, *, until: Callable[[], bool], deadline_s: float) -> None:
        """Run tasks until ``until()``. Raises :class:`Hang` at ``deadline_s``."""
        while not until():
            self._wake()
            self._changed = {task for task in self._changed if not task.done and task.ready()}
            able = sorted(self._due | self._changed, key=lambda task: task.number)
            if able:
                self._switch_to(self._rng.choice(able))
                continue
            next_s = self._sleeping[0][0] if self._sleeping else float("inf")
            if next_s > deadline_s:
                waiting = ", ".join(task.name for task in self._tasks.values())
                raise Hang(f"nothing happens until {deadline_s:g} s; waiting: {waiting}")
            self.now_s = next_s

    def _wake(self) -> None:
        """Find the tasks whose time is over; drop the times of waits that have ended."""
        while self._sleeping:
            wake_s, number, waits = self._sleeping[0]
            task = self._tasks.get(number)
            is_current = task is not None and task.waits == waits and task not in self._due
            if is_current and wake_s > self.now_s:
                return
            heapq.heappop(self._sleeping)
            if task is not None and is_current:
                self._due.add(task)

    def _switch_to(self, task: Task) -> None:
        self.switches += 1
        self._due.discard(task)
        self._changed.discard(task)
        self._current = task
        try:
            task.run.switch()
        finally:
            self._current = None
        if task.done:  # it can have killed its own process
            del self._tasks[task.number]
            self._due.discard(task)

    def close(self) -> None:
        """End all running tasks."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            if task.process is None:
                task.process = Process("closing")
            task.process.dead = True
        for task in tasks:
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
        ended = [self._task.ended] if self._task is not None else []
        active().block(lambda: not self.is_alive(), timeout, on=ended)


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters: Waiters = set()

    def set(self) -> None:
        self._set = True
        active().changed(self._waiters)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            active().block(lambda: self._set, timeout, on=[self._waiters])
        return self._set


class Lock:
    def __init__(self) -> None:
        self._held = False
        self._waiters: Waiters = set()

    def __enter__(self) -> bool:
        if self._held:
            active().block(lambda: not self._held, on=[self._waiters])
        self._held = True
        return True

    def __exit__(self, *error: object) -> None:
        self._held = False
        active().changed(self._waiters)


class Future:
    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.waiters: Waiters = set()

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return False

    def _await(self) -> None:
        if not self._done:
            active().block(lambda: self._done, on=[self.waiters])

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
            active().changed(self.waiters)

    def cancel(self) -> None:
        self._error, self._done = CancelledError(), True
        active().changed(self.waiters)


class CancelledError(Exception):
    """The future never ran."""


class ThreadPoolExecutor:
    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._room, self._name = max_workers, thread_name_prefix
        self._waiting: list[tuple[Future, Callable[[], Any]]] = []
        self._running = 0
        self._waiters: Waiters = set()

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
            active().changed(self._waiters)

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(work, item) for item in items]
        return iter([future.result() for future in futures])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
        if wait and self._running:
            active().block(lambda: not self._running, on=[self._waiters])

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
        active().block(everything, timeout, on=[future.waiters for future in futures])
    done = {future for future in futures if future.done()}
    return SimpleNamespace(done=done, not_done={*futures} - done)


threading = SimpleNamespace(Thread=Thread, Event=Event, Lock=Lock, get_ident=lambda: 0)
"""The part of ``threading`` that the library uses."""
