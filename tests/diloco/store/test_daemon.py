"""Calls in threads that do not delay the exit of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, wait

import pytest

from diloco.store.daemon import DaemonPool


def test_a_pool_calls_functions_in_order_and_at_most_so_many_at_once() -> None:
    running, most, lock, both = 0, 0, threading.Lock(), threading.Barrier(2, timeout=600)

    def call(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if number < 2:
            both.wait()
        with lock:
            running -= 1
        return number

    with DaemonPool(2, "test") as pool:
        calls = [pool.submit(call, number) for number in range(6)]
        assert [one.result(600) for one in calls] == list(range(6))
    assert most == 2


def test_a_pool_returns_exceptions() -> None:
    def fail() -> None:
        raise ValueError("no")

    with DaemonPool(1, "test") as pool:
        with pytest.raises(ValueError, match="no"):
            pool.submit(fail).result(600)
        assert pool.submit(lambda: 1).result(600) == 1


def test_a_pool_that_is_shut_down_cancels_the_calls_that_wait() -> None:
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        assert release.wait(600)

    pool = DaemonPool(1, "test")
    first, second = pool.submit(block), pool.submit(block)
    assert started.wait(600)
    pool.shutdown(wait=False, cancel_futures=True)
    assert wait([second], timeout=600).done == {second}
    with pytest.raises(CancelledError):
        second.result()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(block)
    release.set()
    first.result(600)


def test_a_thread_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = DaemonPool(1, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(int)
    assert pool.submit(int).result(600) == 0
    pool.shutdown()


def test_a_call_that_hangs_does_not_delay_the_exit_of_the_process() -> None:
    program = (
        "import threading\n"
        "from diloco.store.daemon import DaemonPool\n"
        "DaemonPool(2, 'hangs').submit(threading.Event().wait)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_the_objects_of_a_call_are_freed_before_its_result_is_set() -> None:
    class Vector:
        def length(self) -> int:
            return 3

    vector = Vector()
    alive = weakref.ref(vector)
    freed: list[bool] = []
    begins = threading.Event()

    def call(vector: Vector) -> int:
        assert begins.wait(600)
        return vector.length()

    with DaemonPool(1, "test") as pool:
        called = pool.submit(call, vector)
        del vector
        called.add_done_callback(lambda done: freed.append(alive() is None))
        begins.set()
        assert called.result(600) == 3
    assert freed == [True]


def test_the_objects_of_a_call_that_fails_are_freed_with_its_future() -> None:
    class Vector:
        pass

    vector = Vector()
    alive = weakref.ref(vector)

    def fail(vector: Vector) -> None:
        raise ValueError("no")

    gc.disable()
    try:
        with DaemonPool(1, "test") as pool:
            called = pool.submit(fail, vector)
            del vector
            assert isinstance(called.exception(600), ValueError)
        assert alive() is not None
        del called
        assert alive() is None
    finally:
        gc.enable()
