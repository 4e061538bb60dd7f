"""Where a Chromium for the browser tests is; run as a script it prints the path, or fails.

Installing one is ``scripts/bootstrap.py``'s work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """A Chromium that starts: ``CHROMIUM_PATH``, one on ``PATH``, or Playwright's own download."""
    named = os.environ.get("CHROMIUM_PATH")
    found = [named] if named else [shutil.which(name) for name in NAMES]
    for path in found:
        if path and _starts(path):
            return path
    return None if named else _playwright_download()


def _starts(path: str) -> bool:
    """A download without the system libraries it needs is no browser."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _playwright_download() -> str | None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = str(playwright.chromium.executable_path)
    return path if _starts(path) else None


if __name__ == "__main__":
    found = find_chromium()
    if found is None:
        sys.exit("no Chromium found")
    print(found)
