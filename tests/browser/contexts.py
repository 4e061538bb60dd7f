"""Browser contexts that one test uses after another.

A new context has an empty cache: its first page loads and compiles every script, style and font
again, which is a quarter of the CPU of a page. A context that is used again keeps its cache, and
a blank page so that its process goes on. Nothing else remains: its other pages, cookies,
permissions and stored data are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext

VIEWPORT: Any = {"width": 1440, "height": 900}
STORED = "cache_storage,file_systems,indexeddb,local_storage,service_workers,websql"


@dataclass
class ContextPool:
    """Contexts of one origin, ``url``."""

    browser: Browser
    url: str
    idle: list[BrowserContext] = field(default_factory=list)
    _reusable: list[BrowserContext] = field(default_factory=list)

    def new(self, *, scripts: bool = True) -> BrowserContext:
        """A context for one test, which can change it for good."""
        return self.browser.new_context(
            base_url=self.url,
            color_scheme="light",
            viewport=VIEWPORT,
            reduced_motion="reduce",
            java_script_enabled=scripts,
        )

    def take(self) -> BrowserContext:
        if self.idle:
            return self.idle.pop()
        context = self.new()
        context.new_page()
        self._reusable.append(context)
        return context

    def put_back(self, context: BrowserContext, *, again: bool = True) -> None:
        """Close the pages of ``context`` and, if another test can use it ``again``, empty it.

        A request that a page sends at its end can reach a route handler, which fails when the page
        is gone. Playwright would raise that error in the next test.
        """
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        if not again or context not in self._reusable:
            context.close()
            return
        blank, *pages = context.pages
        for page in pages:
            page.close()
        session = context.new_cdp_session(blank)
        session.send("Storage.clearDataForOrigin", {"origin": self.url, "storageTypes": STORED})
        session.detach()
        context.clear_cookies()
        context.clear_permissions()
        self.idle.append(context)

    def close(self) -> None:
        for context in self.idle:
            context.close()
        self.idle.clear()


@contextmanager
def context_pool(browser: Browser, url: str) -> Iterator[ContextPool]:
    pool = ContextPool(browser, url)
    try:
        yield pool
    finally:
        pool.close()
