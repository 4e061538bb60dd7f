"""Where a Chromium for the browser tests is. Installing one is ``scripts/bootstrap.py``'s work."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Path of a Chromium: ``CHROMIUM_PATH``, one on ``PATH``, or Playwright's own download."""
    named = os.environ.get("CHROMIUM_PATH")
    if named:
        return named
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    return _playwright_download()


def _playwright_download() -> str | None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.access(path, os.X_OK) else None
