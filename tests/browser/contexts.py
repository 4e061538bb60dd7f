"""Browser contexts that one test uses after another.

A new context has an empty cache: its first page loads and compiles every script, style and font
again, which is a quarter of the CPU of a page. A context that is used again keeps its cache, and
nothing else: its pages, cookies, permissions and stored data are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

VIEWPORT: Any = {"width": 1440, "height": 900}
STORED = "cache_storage,file_systems,indexeddb,local_storage,service_workers,websql"


@dataclass
class ContextPool:
    """Contexts of one origin, ``url``."""

    browser: Browser
    url: str
    idle: list[BrowserContext] = field(default_factory=list)

    def new(self, *, scripts: bool = True) -> BrowserContext:
        return self.browser.new_context(
            base_url=self.url,
            color_scheme="light",
            viewport=VIEWPORT,
            reduced_motion="reduce",
            java_script_enabled=scripts,
        )

    def take(self) -> BrowserContext:
        return self.idle.pop() if self.idle else self.new()

    def put_back(self, context: BrowserContext) -> None:
        for page in context.pages:
            page.close()
        context.clear_cookies()
        context.clear_permissions()
        self.idle.append(context)

    def open_page(self, context: BrowserContext) -> Page:
        """A blank page. If it is the first, nothing is stored for the origin."""
        page = context.new_page()
        if len(context.pages) == 1:
            session = context.new_cdp_session(page)
            stored = {"origin": self.url, "storageTypes": STORED}
            session.send("Storage.clearDataForOrigin", stored)
            session.detach()
        return page

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


@contextmanager
def context_pool(browser: Browser, url: str) -> Iterator[ContextPool]:
    pool = ContextPool(browser, url)
    try:
        yield pool
    finally:
        pool.close()
