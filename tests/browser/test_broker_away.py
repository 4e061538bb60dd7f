"""A page polls while the broker is down, shows that it polls, and returns to the live stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import (
    BLANK,
    QUICK_TIMERS,
    opened_window,
    running_site,
    worker_heartbeats,
)
from tests.servers import running_valkey

pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    pytest.mark.weight(4),
    pytest.mark.usefixtures("own_database"),
]


def test_page_polls_until_the_broker_is_back(browser: Browser, tmp_path: Path) -> None:
    broker, var = tmp_path / "b", tmp_path / "v"
    broker.mkdir()
    var.mkdir()
    with running_valkey(broker) as redis_url:
        pass  # only for its address: the folder keeps port and password
    with (
        running_site(var, redis_url) as site,
        opened_window(browser, site, "broker-away") as window,
    ):
        run = site.seed("name='Watched', committed=2")
        page = window.open(BLANK)
        page.add_init_script(QUICK_TIMERS)
        page.goto(f"/runs/{run}/")
        dot, loss = page.locator("[data-conn]"), page.locator('[data-s="eval_loss"]')
        expect(dot).to_have_attribute("data-state", "polling")
        site.python(
            f"from runs.models import Run; Run.objects.filter(pk='{run}').update(eval_loss=0.5)"
        )
        expect(loss).to_have_text("0.500")
        with running_valkey(broker), worker_heartbeats(redis_url):
            expect(dot).to_have_attribute("data-state", "live")
            # Like the worker: first the table, then the stream. After reconnecting the page loads
            # a snapshot, which would undo a delta that is in no table.
            site.python(
                "from runs.models import Run; "
                f"Run.objects.filter(pk='{run}').update(eval_loss=0.25)"
            )
            site.publish(run, run={"eval_loss": 0.25})
            expect(loss).to_have_text("0.250")
        expect(dot).to_have_attribute("data-state", "polling")
