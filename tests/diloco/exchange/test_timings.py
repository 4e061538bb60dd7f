"""Durations of phases that several threads measure."""

from __future__ import annotations

from diloco.exchange.timings import Timings
from tests.diloco.clocks import ManualClock


def test_the_rest_is_what_no_other_thread_measures() -> None:
    clock = ManualClock()
    timings = Timings(clock)
    with timings.measure_rest("upload"):
        clock.sleep(3.0)
        timings.add("download", 2.0)
    assert timings.seconds == {"download": 2.0, "upload": 1.0}
    with timings.measure_rest("upload"):
        clock.sleep(1.0)
        timings.add("download", 5.0)  # a part that began before
    assert timings.seconds == {"download": 7.0, "upload": 1.0}
