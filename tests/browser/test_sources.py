"""Pages load one script; with ``ARCHIPELAGO_DEBUG`` the modules of ``static/js`` as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Site, Window, serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def debugged(
    tmp_path_factory: pytest.TempPathFactory, valkey: str, own_database: None
) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ARCHIPELAGO_DEBUG", "true")
            site = stack.enter_context(serving(tmp_path_factory.mktemp("debugged"), valkey))
        site.python("seed.user('olga', 'operator')")
        yield site


def scripts(page: Any) -> set[str]:
    entries = "performance.getEntriesByType('resource').map((e) => new URL(e.name).pathname)"
    return {path for path in page.evaluate(entries) if path.endswith(".js")}


def test_modules_work_as_they_are(browser: Browser, debugged: Site) -> None:
    run = debugged.seed("name='As it is', committed=4")
    window = Window(browser=browser, url=debugged.url, name="sources")
    page = window.open(f"/runs/{run}/")
    expect(page.locator('[data-plot="loss"] canvas').first).to_be_visible()
    assert "/static/js/app.js" in scripts(page)
    assert "/static/js/run/chart.js" in scripts(page)
    assert not any("/dist/" in path for path in scripts(page))
    for path in ("/", "/runs/new", "/planner", f"/compare?ids={run}", f"/runs/{run}/replicas/0/"):
        page.goto(path)
        expect(page.locator("h1")).to_be_visible()
    window.close()
    assert window.errors == []


def test_otherwise_there_is_one_file_and_no_module(window: Window, site: Site) -> None:
    run = site.seed("name='In one', committed=4")
    page = window.open(f"/runs/{run}/")
    expect(page.locator('[data-plot="loss"] canvas').first).to_be_visible()
    assert scripts(page) == {
        "/static/dist/app.js",
        "/static/vendor/uplot-1.6.32/uPlot.iife.min.js",
    }
    assert page.request.get("/static/js/app.js").status == 404
    assert page.request.get("/static/js/package.json").status == 404
