"""Pages load the bundle; with ``ARCHIPELAGO_DEBUG`` they load the modules of ``static/js``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Site, Window, opened_window, running_site

pytestmark = [pytest.mark.browser, pytest.mark.weight(4)]


@pytest.fixture(scope="module")
def debug_site(
    tmp_path_factory: pytest.TempPathFactory, valkey: str, own_database: None
) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ARCHIPELAGO_DEBUG", "true")
            site = stack.enter_context(running_site(tmp_path_factory.mktemp("debug"), valkey))
        site.python("seed.user('olga', 'operator')")
        yield site


def scripts(page: Any) -> set[str]:
    entries = "performance.getEntriesByType('resource').map((e) => new URL(e.name).pathname)"
    return {path for path in page.evaluate(entries) if path.endswith(".js")}


@pytest.mark.slow
def test_unbundled_modules_work(browser: Browser, debug_site: Site) -> None:
    run = debug_site.seed("name='Unbundled', committed=4")
    with opened_window(browser, debug_site, "sources") as window:
        page = window.open(f"/runs/{run}/")
        expect(page.locator('[data-plot="loss"] canvas').first).to_be_visible()
        assert "/static/js/run.js" in scripts(page)
        assert "/static/js/run/chart.js" in scripts(page)
        assert not any("/dist/" in path for path in scripts(page))
        for path in (
            "/",
            "/runs/new",
            "/planner",
            f"/compare?ids={run}",
            f"/runs/{run}/replicas/0/",
        ):
            page.goto(path)
            expect(page.locator("h1")).to_be_visible()


def test_pages_load_their_bundle_and_modules_are_not_served(window: Window, site: Site) -> None:
    run = site.seed("name='Bundled', committed=4")
    page = window.open(f"/runs/{run}/")
    expect(page.locator('[data-plot="loss"] canvas').first).to_be_visible()
    assert "/static/dist/run.js" in scripts(page)
    assert not any(path.startswith("/static/js/") for path in scripts(page))
    assert page.request.get("/static/js/run.js").status == 404
    assert page.request.get("/static/js/package.json").status == 404
