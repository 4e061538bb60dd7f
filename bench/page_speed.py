"""How fast a warm run page appears, whether it moves, and how smoothly it is drawn while replicas
stream.

A run with ``--replicas`` replicas and 200 rounds, a separate web server, headless Chromium at
1440 x 900. *First paint* and *largest paint* are the browser's own entries of a load with a warm
cache; *layout shift* is the sum of its entries until the page is live and idle. Then every replica
sends two points and its row each second for ``--seconds``, as the control plane publishes them:
*frames* counts the drawings of that time, the shares are CPU time of the page's main
thread.

Usage: python bench/page_speed.py [--replicas 64] [--seconds 20] [--repeat 10]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WRITE = """
import json
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from runs.queries import fleet
owner = seed.user("olga", "operator")
run = seed.run(owner, name="Streaming", replicas=REPLICAS, committed=200, total_rounds=1000)
session = SessionStore()
session[SESSION_KEY] = str(owner.pk)
session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
session[HASH_SESSION_KEY] = owner.get_session_auth_hash()
session.save()
print(json.dumps([str(run.pk), session.session_key, fleet.replica_rows(run)]))
"""
OBSERVE = """
window.seen = { largest: 0, shift: 0, moved: [] };
new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) seen.largest = entry.startTime;
}).observe({ type: "largest-contentful-paint", buffered: true });
new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
        seen.shift += entry.value;
        for (const { node, previousRect: a, currentRect: b } of entry.sources) {
            const place = node?.className ?? node?.parentElement?.className;
            const by = [b.x - a.x, b.y - a.y, b.width - a.width, b.height - a.height];
            seen.moved.push(`${place} ${by.map(Math.round)} (${entry.value.toFixed(4)})`);
        }
    }
}).observe({ type: "layout-shift", buffered: true });
"""
FRAMES = """(ms) => new Promise((resolve) => {
    const times = [];
    const end = performance.now() + ms;
    const frame = (at) => {
        times.push(at);
        if (at < end) requestAnimationFrame(frame);
        else resolve(times);
    };
    requestAnimationFrame(frame);
})"""
IDLE_MS = 1500


def loads(page: Any, path: str, repeat: int) -> None:
    """Paints and shifts of warm loads; the first load fills the cache."""
    found: dict[str, list[float]] = {"first paint": [], "largest paint": [], "layout shift": []}
    moved: set[str] = set()
    for number in range(repeat + 1):
        page.goto(path)
        page.locator("[data-conn][data-state=live]").wait_for()
        page.wait_for_timeout(IDLE_MS)
        if not number:
            continue
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        seen = page.evaluate("seen")
        moved |= set(seen["moved"])
        found["first paint"].append(first)
        found["largest paint"].append(seen["largest"])
        found["layout shift"].append(seen["shift"])
    print("| a warm load | median | highest |\n| --- | ---: | ---: |")
    for name, values in found.items():
        form, unit = (".4f", "") if name == "layout shift" else (".0f", " ms")
        print(f"| {name} | {statistics.median(values):{form}}{unit} | {max(values):{form}}{unit} |")
    for place in sorted(moved):
        print(f"moved by x, y, width, height: {place}")


def streamed(page: Any, site: Any, run: str, rows: list[dict[str, Any]], seconds: float) -> None:
    """Frames while every replica sends two points and its row each second."""
    stop = threading.Event()

    def send() -> None:
        step = 0
        while not stop.wait(1 / 16):  # a sixteenth of the replicas at a time
            part = rows[step % 16 :: 16]
            now = time.time()
            for row in part:
                row["step"] += 2
                row["loss"] = 2.0 + 0.1 * ((row["step"] * 7919) % 13) / 13
            points = [
                {
                    "series": "loss",
                    "replica": row["number"],
                    "step": [row["step"] - 1, row["step"]],
                    "round": [201, 201],
                    "tokens": [row["step"] * 4096 - 4096, row["step"] * 4096],
                    "wall_s": [now - 0.5, now],
                    "value": [row["loss"], row["loss"]],
                    "nonfinite": [],
                    "total": 2,
                }
                for row in part
            ]
            site.publish(run, replicas=part, points=points)
            step += 1

    sender = threading.Thread(target=send)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    sender.start()
    page.wait_for_timeout(2000)
    before = metrics(session)
    times = page.evaluate(FRAMES, seconds * 1000)
    after = metrics(session)
    stop.set()
    sender.join()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    spent = {name: after[name] - before[name] for name in before}
    print("\n| while they stream | |\n| --- | ---: |")
    print(f"| frames a second | {1000 * len(gaps) / sum(gaps):.1f} |")
    print(f"| gap between frames, p99 | {sorted(gaps)[int(0.99 * len(gaps))]:.0f} ms |")
    print(f"| gaps above 50 ms | {sum(gap > 50 for gap in gaps)} of {len(gaps)} |")
    for name, value in spent.items():
        print(f"| {name}, share of the time | {100 * value / seconds:.1f} % |")


def metrics(session: Any) -> dict[str, float]:
    names = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "TaskDuration")
    every = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    return {name: every[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from scripts.browser import find_chromium
    from tests.browser.conftest import FLAGS, running_site, worker_heartbeats
    from tests.servers import running_valkey

    with (
        tempfile.TemporaryDirectory() as folder,
        running_valkey(Path(folder)) as redis,
        running_site(Path(folder), redis) as site,
        worker_heartbeats(redis),
        sync_playwright() as playwright,
    ):
        run, session, rows = json.loads(
            site.python(f"REPLICAS = {options.replicas}\n" + WRITE).splitlines()[-1]
        )
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        context = browser.new_context(base_url=site.url, viewport={"width": 1440, "height": 900})
        context.set_default_timeout(120_000)
        context.add_cookies([{"name": "sessionid", "value": session, "url": site.url}])
        context.add_init_script(OBSERVE)
        page = context.new_page()
        loads(page, f"/runs/{run}/", options.repeat)
        streamed(page, site, run, rows, options.seconds)
        browser.close()


if __name__ == "__main__":
    main()
