"""Find a Chromium for the browser tests; as a script, print its path or fail.

``scripts/bootstrap.py`` installs one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = (
    "chromium-headless-shell",  # without the parts that draw windows: takes two thirds of the CPU
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
DOWNLOADED = """
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    print(playwright.chromium.executable_path)
"""


def find_chromium() -> str | None:
    """A Chromium that starts: ``CHROMIUM_PATH``, one on ``PATH``, or Playwright's download."""
    named = os.environ.get("CHROMIUM_PATH")
    candidates = [named] if named else [shutil.which(name) for name in NAMES]
    for path in candidates:
        if path and _starts(path):
            return path
    return None if named else _playwright_download()


def _starts(path: str) -> bool:
    """Whether it runs: a download can lack the system libraries that it needs."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _playwright_download() -> str | None:
    """Asks Playwright in a new process: the caller may already control a browser."""
    done = subprocess.run([sys.executable, "-c", DOWNLOADED], capture_output=True, text=True)
    path = done.stdout.strip()
    return path if path and _starts(path) else None


if __name__ == "__main__":
    chromium = find_chromium()
    if chromium is None:
        sys.exit("no Chromium found")
    print(chromium)
