"""Latency from a replica's bucket to the open page of the run.

The whole server as ``manage.py serve`` starts it, replicas that train on this machine, and the
run's page in headless Chromium. A telemetry segment counts as written at its object's modification
time; it is on the screen with the first frame after the replica's step in the table is the
segment's last one or a later one. Both clocks are this machine's. A frame that shows several
segments counts for each of them.

Usage: python bench/live_latency.py [--seconds 60] [--replicas 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e import lives  # noqa: E402
from tests.stack import PASSWORD, LiveStack, running_stack  # noqa: E402

WATCH = """
() => {
  window.seen = [];
  const rows = document.querySelector('[data-replicas="short"] tbody');
  const note = () => requestAnimationFrame(() => {
    for (const row of rows.rows) {
      const step = Number(row.querySelector('[data-c="step"]').textContent.replace(/\\D/g, ""));
      window.seen.push([Date.now() / 1000, Number(row.dataset.key), step]);
    }
  });
  new MutationObserver(note).observe(rows, { subtree: true, childList: true, characterData: true });
  note();
}
"""


def watched(stack: LiveStack, run: str, seconds: float) -> list[tuple[float, int, int]]:
    """(time, replica, step) of what the page showed."""
    from playwright.sync_api import sync_playwright

    from scripts.browser import find_chromium

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto(f"{stack.url}login?next=/runs/{run}/")
        page.get_by_label("Username").fill("operator")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_selector('[data-conn][data-state="live"]')
        page.wait_for_selector('[data-replicas="short"] tbody tr')
        page.evaluate(WATCH)
        page.wait_for_timeout(seconds * 1000)
        seen = page.evaluate("window.seen")
        browser.close()
    return [(at, replica, step) for at, replica, step in seen]


def written(rendezvous: str) -> list[tuple[float, int, int]]:
    """(time, replica, last step) of every telemetry segment with steps."""
    folder = Path(unquote(urlsplit(rendezvous).path))
    found = []
    for path in folder.glob("telemetry/*/*/*.json"):
        segment: dict[str, Any] = json.loads(path.read_bytes())
        steps = segment["steps"]["step"]
        if steps:
            found.append((path.stat().st_mtime, segment["replica"], steps[-1]))
    return found


def latencies(
    segments: list[tuple[float, int, int]], seen: list[tuple[float, int, int]]
) -> tuple[list[float], int]:
    """Seconds of each segment written while the page was open, and how many were never shown."""
    if not seen:
        return [], len(segments)
    begin, end = seen[0][0], seen[-1][0]
    found, missed = [], 0
    for at, replica, step in sorted(segments):
        if not begin <= at <= end - 5:
            continue
        shown = next((t for t, r, s in seen if r == replica and s >= step and t >= at), None)
        if shown is None:
            missed += 1
        else:
            found.append(shown - at)
    return found, missed


def at(took: list[float], share: float) -> str:
    return f"{took[int(len(took) * share)]:.2f}" if took else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(Path(folder), OMP_NUM_THREADS="1") as stack,
    ):
        run = lives.create(
            stack, "watched", num_replicas=options.replicas, sync_every=20, total_rounds=10_000
        )
        seen = lives.wait_for(stack, run, lambda seen: seen["rounds"] >= 2)
        shown = watched(stack, run, options.seconds)
        found, missed = latencies(written(seen["rendezvous"]), shown)
    took = sorted(found)
    print("| replicas | segments | not shown | p50, s | p95, s | max, s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {options.replicas} | {len(took) + missed} | {missed} | {at(took, 0.5)} "
        f"| {at(took, 0.95)} | {max(took, default=0):.2f} |"
    )


if __name__ == "__main__":
    main()
