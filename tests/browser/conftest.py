"""Fixtures of a browser and of a web server with seeded runs.

A test fails if one of its pages raises an exception, logs an error to the console, or violates the
content security policy. The pages of a failed test are stored in ``test-artifacts/`` (not
committed), and with the option ``--screenshots`` those of every test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    expect,
    sync_playwright,
)
from redis.client import Pipeline

from tests.browser.accessibility import Contrast
from tests.browser.contexts import VIEWPORT, ContextPool, context_pool
from tests.django_process import DjangoProcess
from tests.servers import child, free_ports, wait_until
from tests.stack import REPOSITORY, LiveStack, stack_env

HEARTBEAT = "archipelago:heartbeat"
BEAT_S = 5.0
WRITTEN_BY_A_TEST_S = 1e9
"""A heartbeat before this time was written by a test."""

ARTIFACTS = REPOSITORY / "test-artifacts"
PASSWORD = "correct horse battery"
PATIENCE_MS = int(os.environ.get("PATIENCE_MS", "240000"))
"""Timeout of expectations. Updates take at most a poll (5 s), but minutes on a busy machine."""
OVERFLOW_MS = 60_000
MOST_TABS = 200
POLL_MS = 50
NO_SHARED_WORKER = "Object.defineProperty(window, 'SharedWorker', { value: undefined })"
"""Init script of a page with its own stream, as in Chromium on Android. Playwright sees only the
requests of pages, not those of shared workers."""
QUICK_TIMERS = """
{
    const wait = window.setTimeout;
    const quick = (ms) => (ms < 1000 || ms > 20000 ? ms : ms / 20);
    window.setTimeout = (act, ms = 0, ...rest) => wait(act, quick(ms), ...rest);
}
"""
"""Init script of a page whose polls and refreshes, seconds apart, are awaited. Longer timers limit
how long something may take."""
CUT_TEXTS = """
{
    const fill = CanvasRenderingContext2D.prototype.fillText;
    window.cut = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
        const { a, b, e } = this.getTransform();
        const { width } = this.measureText(text);
        const from = x - width * ({ center: 0.5, right: 1, end: 1 }[this.textAlign] ?? 0);
        const isCut = from * a + e < -0.5 || (from + width) * a + e > this.canvas.width + 0.5;
        if (isCut && !b) window.cut.push(text); // not of a rotated text
        return fill.call(this, text, x, ...rest);
    };
}
"""
"""Init script of a page that lists in `cut` the texts of charts that are cut off at their sides."""
BLANK = "about:blank"
SIGN_IN = """
from django.contrib.auth.models import User
from django.test import Client
client = Client()
client.force_login(User.objects.get(username={user!r}))
print(client.cookies["sessionid"].value)
"""
PRELOADED = "was preloaded using link preload but not used"
"""Chromium's warning about the font, which a later page of a context takes from memory."""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    # Fewer processes and threads for each page: a sixth of the browser's CPU.
    "--disable-site-isolation-trials",
    "--renderer-process-limit=1",
    "--num-raster-threads=1",
    "--in-process-gpu",
]


@pytest.fixture(scope="session")
def browser(chromium_path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path, args=FLAGS, timeout=PATIENCE_MS
        )
        expect.set_options(timeout=PATIENCE_MS)
        # Playwright runs an event loop in this thread, so Django refuses synchronous queries.
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
        yield browser
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        browser.close()


@dataclass(frozen=True, kw_only=True)
class Site:
    """A web server with a separate database, seeded by :mod:`tests.browser.seed`."""

    url: str
    env: dict[str, str]
    redis_url: str
    process: DjangoProcess

    def python(self, code: str) -> str:
        """Run ``code`` in a process on the same database, and return its output."""
        return self.process.run("from tests.browser import seed\n" + code)

    def seed(self, arguments: str) -> str:
        """Create a run owned by olga, and return its id: ``seed("name='x', committed=3")``."""
        return self.python(f"print(seed.run(seed.user('olga', 'operator'), {arguments}).pk)")

    def publish(self, run_id: str, /, **delta: Any) -> None:
        """Publish a delta on the live stream, as the reconciler does."""
        with contextlib.closing(redis.Redis.from_url(self.redis_url)) as client:
            client.xadd("archipelago:live", {"run": run_id, "data": json.dumps(delta)})


@contextlib.contextmanager
def running_site(var: Path, redis_url: str) -> Iterator[Site]:
    (port,) = free_ports(1)
    env = {
        **stack_env(var, migrated=True),
        "REDIS_URL": redis_url,
        "DJANGO_SETTINGS_MODULE": "dashboard.settings",
        "PYTHONPATH": str(REPOSITORY),
    }
    options = f"--port {port} --timeout-graceful-shutdown 1 --log-level warning"
    application = "tests.browser.site_application:application"
    command = [sys.executable, "-m", "uvicorn", application, *options.split()]
    log = var / "web.log"
    with contextlib.closing(DjangoProcess(env)) as django:
        site = Site(url=f"http://127.0.0.1:{port}", env=env, redis_url=redis_url, process=django)
        with child(command, log=log, env=env, cwd=REPOSITORY) as process:
            wait_until(lambda: answers(site.url), "no web server", process=process, log=log)
            yield site


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{url}/static/favicon.svg", timeout=2).close()
        return True
    return False


@pytest.fixture(scope="session")
def site(
    tmp_path_factory: pytest.TempPathFactory, valkey: str, own_database: None
) -> Iterator[Site]:
    """Users admin, olga (operator), oscar (operator) and vera (viewer); no run yet."""
    with running_site(tmp_path_factory.mktemp("site"), valkey) as site:
        site.python(
            "seed.user('admin', 'admin'); seed.user('olga', 'operator');"
            "seed.user('oscar', 'operator'); seed.user('vera', 'viewer')"
        )
        with worker_heartbeats(valkey):
            yield site


@contextlib.contextmanager
def worker_heartbeats(redis_url: str) -> Iterator[None]:
    """Keep the worker heartbeat fresh, unless a test wrote an old one.

    No worker runs in these tests, and pages would show a banner without the heartbeat.
    """
    client, stop = redis.Redis.from_url(redis_url), threading.Event()

    def refresh(pipe: Pipeline) -> None:
        beat_at = pipe.get(HEARTBEAT)
        pipe.multi()
        if beat_at is None or float(beat_at) > WRITTEN_BY_A_TEST_S:  # type: ignore[arg-type]
            pipe.set(HEARTBEAT, time.time())

    def beat() -> None:
        while not stop.is_set():
            client.transaction(refresh, HEARTBEAT)  # again if a test writes one meanwhile
            stop.wait(BEAT_S)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass
class Window:
    """Opens pages as a user, and collects errors of their consoles."""

    pool: ContextPool
    server: Site | LiveStack
    name: str
    screenshots: bool = False
    errors: list[str] = field(default_factory=list)
    contexts: list[BrowserContext] = field(default_factory=list)
    signed_in: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.pool.url

    def open(
        self,
        path: str,
        *,
        user: str | None = "olga",
        width: int = 1440,
        height: int = 900,
        scheme: Any = "light",
        alone: bool = False,
        scripts: bool = True,
    ) -> Page:
        """Open ``path`` in a context without stored data, signed in as ``user``. A context that the
        test changes for good, by a clock or an init script, is used by it ``alone``."""
        if alone or not scripts:
            context = self.pool.new(scripts=scripts)
        else:
            context = self.pool.take()
        self.contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        if user is not None:
            context.add_cookies([self._session(user)])
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("console", self._record)
        if (width, height) != tuple(VIEWPORT.values()):
            page.set_viewport_size({"width": width, "height": height})
        if scheme != "light":
            page.emulate_media(color_scheme=scheme)
        page.goto(path)
        return page

    def _session(self, user: str) -> Any:
        """The cookie of a session, created by the server without its form, which takes a second."""
        if user not in self.signed_in:
            key = self.server.python(SIGN_IN.format(user=user))
            self.signed_in[user] = {"name": "sessionid", "value": key, "url": self.url}
        return self.signed_in[user]

    def _record(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and PRELOADED not in message.text:
            self.errors.append(message.text)

    def shoot(self, page: Page, name: str, *, full: bool = True) -> None:
        """Store a picture for a reader; only with ``--screenshots``, because one costs 0.3 s."""
        if self.screenshots:
            ARTIFACTS.mkdir(exist_ok=True)
            page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=full)

    def fits(self, page: Page, name: str, *widths: int, full: bool = True) -> None:
        """Resize the page to each width and check that nothing overflows. ``--screenshots`` stores
        each of them in light and dark.

        A page costs a second to load and nothing to resize. Open it at the smallest width, because
        scripts that measure at the start fail there first.
        """
        for width in widths:
            page.set_viewport_size({"width": width, "height": 900})
            wide = overflow(page)
            assert wide <= 0, f"{name}: {wide} pixels too wide at {width}: {beyond(page, width)}"
            for scheme in ("light", "dark") if self.screenshots else ():
                page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
                page.wait_for_timeout(150)  # let canvases paint before the picture is taken
                self.shoot(page, f"{name}-{width}-{scheme}", full=full)

    def shoot_failed(self) -> None:
        """Store pictures of all pages, for the reader of a failure."""
        name = re.sub(r"\W+", "-", self.name).strip("-")
        self.screenshots = True
        for number, context in enumerate(self.contexts):
            for page in (page for page in context.pages if page.url != BLANK):
                with contextlib.suppress(Exception):
                    self.shoot(page, f"failed-{name}-{number}", full=False)

    def close(self, *, failed: bool = False) -> None:
        """Close all pages. A context that a failed test used is not used again."""
        while self.contexts:
            self.pool.put_back(self.contexts.pop(), again=not failed)


@contextlib.contextmanager
def opened_window(browser: Browser, server: Site | LiveStack, name: str) -> Iterator[Window]:
    """A window on another server than that of the fixture `site`."""
    with context_pool(browser, server.url.rstrip("/")) as pool:
        window = Window(pool=pool, server=server, name=name)
        yield window
        window.close()
    assert window.errors == []


@pytest.fixture(scope="session")
def contexts(browser: Browser, site: Site) -> Iterator[ContextPool]:
    with context_pool(browser, site.url) as pool:
        yield pool


@pytest.fixture
def window(
    contexts: ContextPool, site: Site, request: pytest.FixtureRequest, sign_ins: dict[str, Any]
) -> Iterator[Window]:
    window = Window(
        pool=contexts,
        server=site,
        name=request.node.name,
        screenshots=request.config.getoption("--screenshots"),
        signed_in=sign_ins,
    )
    yield window
    failed = request.node.stash.get(FAILED, False)
    if failed:
        window.shoot_failed()
    window.close(failed=failed)
    assert window.errors == []


@pytest.fixture(scope="session")
def contrast() -> Contrast:
    """The looks of texts that a test of this process has examined."""
    return Contrast()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Store whether the test failed, so that its pages are saved as screenshots."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def sign_ins() -> dict[str, Any]:
    """Session cookies by user, so that each user signs in once."""
    return {}


def beyond(page: Page, width: int) -> Any:
    """Elements beyond the right edge, including those inside scrolling containers."""
    return page.evaluate(
        """(width) => [...document.querySelectorAll("body *")]
        .filter((e) => e.getBoundingClientRect().right > width + 1)
        .map((e) => e.tagName + "." + e.className).slice(0, 8)""",
        width,
    )


def expect_address(page: Page, *parts: str) -> None:
    """Wait until the address of the page contains each of ``parts``."""
    for part in parts:
        expect(page).to_have_url(re.compile(re.escape(part)))


def tab_to(page: Page, target: Locator, *, key: str = "Tab") -> None:
    """Press ``key`` until ``target`` has the focus, as a user without a mouse does."""
    for _ in range(MOST_TABS):
        page.keyboard.press(key)
        if target.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"{target} does not get the focus by {key}")


def eventually(page: Page, read: Callable[[], Any], accept: Callable[[Any], bool]) -> Any:
    """Read until ``accept`` is true of the value, which is returned: for a value that no assertion
    of `expect` can wait for."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not accept(value := read()):
        assert time.monotonic() < end, f"last read: {value!r}"
        page.wait_for_timeout(POLL_MS)
    return value


def next_frame(page: Page) -> None:
    """Wait until the page has drawn what its scripts have changed by now."""
    page.evaluate("() => new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(d)))")


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than its window; waits until it fits.

    Charts and tables follow the width of the window one after another. The loop is a function in
    the page: the content security policy forbids `Page.wait_for_function`, which evaluates text.
    """
    wide: int = page.evaluate(
        """(patience) => new Promise((resolve) => {
            const end = performance.now() + patience;
            const measure = () => {
                const wide = document.documentElement.scrollWidth - innerWidth;
                if (wide <= 0 || performance.now() > end) resolve(wide);
                else setTimeout(measure, 50);
            };
            measure();
        })""",
        OVERFLOW_MS,
    )
    return wide
