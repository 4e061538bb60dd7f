"""Requests of a shutdown by signals, commands and callers."""

from __future__ import annotations

from diloco.membership.graceful_shutdown import GracefulShutdown, ShutdownRequest
from tests.diloco.clocks import ManualClock


def test_of_several_requests_the_earliest_deadline_applies() -> None:
    clock = ManualClock()
    shutdown = GracefulShutdown(clock)
    assert (shutdown.is_requested, shutdown.left_s, shutdown.reason) == (False, 0.0, "")
    shutdown.request(within_s=3600.0, reason="command")
    clock.now_s += 10.0
    shutdown.request(within_s=30.0, reason="SIGTERM")
    shutdown.request(within_s=600.0, reason="too late")
    assert (shutdown.left_s, shutdown.reason) == (30.0, "SIGTERM")


def test_a_signal_that_interrupts_a_request_keeps_its_earlier_deadline() -> None:
    shutdown = GracefulShutdown(ManualClock())

    class Interrupted(list[ShutdownRequest]):
        def append(self, request: ShutdownRequest) -> None:
            if request.reason == "command":
                shutdown.request(within_s=10.0, reason="SIGTERM")
            super().append(request)

    shutdown._requests = Interrupted()
    shutdown.request(within_s=3600.0, reason="command")
    assert (shutdown.left_s, shutdown.reason) == (10.0, "SIGTERM")
