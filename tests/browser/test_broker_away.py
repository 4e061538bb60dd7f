"""The page while the broker dies and comes back: it polls, says so, and goes live again."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Window, serving
from tests.servers import running_valkey

pytestmark = [
    pytest.mark.browser, pytest.mark.processes, pytest.mark.usefixtures("own_database"),
]  # fmt: skip


def test_the_page_polls_until_the_broker_is_back(browser: Browser, tmp_path: Path) -> None:
    broker, var = tmp_path / "b", tmp_path / "v"
    broker.mkdir()
    var.mkdir()
    with running_valkey(broker) as redis_url:
        pass  # only to learn its address: the folder keeps port and password
    with serving(var, redis_url) as site:
        run = site.seed("name='Watched', committed=2")
        window = Window(browser=browser, url=site.url, name="broker-away")
        page = window.open(f"/runs/{run}/")
        dot, loss = page.locator("[data-conn]"), page.locator('[data-s="eval_loss"]')
        expect(dot).to_have_attribute("data-state", "polling")
        site.python(
            f"from runs.models import Run; Run.objects.filter(pk='{run}').update(eval_loss=0.5)"
        )
        expect(loss).to_have_text("0.500")  # it polls every 5 s
        with running_valkey(broker):
            expect(dot).to_have_attribute("data-state", "live")
            # As the worker does: first the table, then the stream. Being live again the page
            # reads a new snapshot, which would rightly undo a delta that is in no table.
            site.python(
                "from runs.models import Run; "
                f"Run.objects.filter(pk='{run}').update(eval_loss=0.25)"
            )
            site.publish(run, run={"eval_loss": 0.25})
            expect(loss).to_have_text("0.250")
        expect(dot).to_have_attribute("data-state", "polling")
        window.close()
        assert window.errors == []
