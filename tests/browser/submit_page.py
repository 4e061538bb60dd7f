"""The submit form in the tests: its closed sections."""

from __future__ import annotations

from playwright.sync_api import Page


def open_section(page: Page, name: str) -> None:
    page.locator(".section-card > summary", has=page.get_by_role("heading", name=name)).click()


def open_all(page: Page) -> None:
    page.evaluate("document.querySelectorAll('.section-card').forEach((one) => one.open = true)")
