"""Check every screen with axe-core, in light and dark, with one run and with many; those without
data are checked by test_first_start.py.

The component for times writes those of each screen, which must also fit every width of
:data:`WIDTHS`; ``--screenshots`` stores it in each of them. axe finds problems of names, roles,
contrast and structure; a violation of any impact, of best practices too, fails the test. Reading
order and alternative texts need a manual review.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.accessibility import Contrast, problems_in_both_schemes
from tests.browser.conftest import BLANK, PASSWORD, Site, Window, expect_address
from tests.browser.contexts import ContextPool
from tests.browser.test_times import check_times
from tests.matrix import matrix

pytestmark = pytest.mark.browser

WIDTHS = (360, 800, 2560, 1280)
"""The smallest width with each of the main layouts, and a large screen; axe sees the last one."""
EVALUATED = """
from tests.browser import seed_evaluations as e
run = seed.run(seed.user('olga', 'operator'), name='Local demo')
plan = e.evaluations(run, 2, 4, name='val', tasks=e.TASKS)
e.queue(plan, 10, state='failed', message='data: expected token shards, found none')
print(run.pk)
"""
ALERTS = [
    "import datetime",
    "from django.utils import timezone",
    "from runs.models import Alert, Run",
    "now = timezone.now()",
    "run = Run.objects.get(pk='{run}')",
    "for level in ('info', 'warning', 'error'):",
    "    for n in range(3):",
    "        Alert.objects.create(run=run, kind='replica_lost', subject=f'{{level}} {{n}}',"
    " level=level, message='replica ' + 'with-a-very-long-name-' * 8, first_at=now, opened_at=now,"
    " closed_at=None if n else now, times=n + 1, acknowledged_at=now if n == 2 else None,"
    " acknowledged_by=run.owner if n == 2 else None)",
]
"""Code that creates open, closed and acknowledged alerts of all levels."""

RUN_TABS = (
    "rounds",
    "timeline",
    "replicas",
    "logs",
    "system",
    "checkpoints",
    "evaluations",
    "settings",
    "activity",
    "overview",
)
"""The overview is the last one: axe examines the whole page with it, which loses equal rows."""
SCREENS = {
    "runs": "/",
    "runs-differing": "/?columns=state,name,loss,age&differ=1",
    "new": "/runs/new",
    "clone": "/runs/new?clone={run}",
    "sweeps": "/sweeps",
    "sweep": "/sweeps/{sweep}",
    "planner": "/planner",
    "tokens": "/settings/tokens",
    "password": "/settings/password",
    "users": "/settings/people",
    "alerts": "/alerts",
    "search": "/search?q=r",
    "backends": "/settings/backends",
    "budgets": "/settings/budgets",
    "prices": "/settings/prices",
    "price": "/settings/prices/hardware/modal/H100",
    "traffic": "/settings/prices/traffic/s3",
    "credentials": "/settings/credentials",
    "credential": "/settings/credentials/new/modal",
    "trackers": "/settings/trackers",
    "tracker": "/settings/trackers/new/mlflow",
    "webhooks": "/settings/webhooks",
    "api-docs": "/api/docs",
    "not-found": "/nowhere",
    **{f"run-{tab}": f"/runs/{{run}}/?tab={tab}" for tab in RUN_TABS},
    "evaluation": "/runs/{run}/evaluations/add",
    "round": "/runs/{run}/?tab=rounds&round=5",
    "replica": "/runs/{run}/replicas/1/",
    "pool-add": "/runs/{run}/pools/add",
    "delete": "/runs/{failed}/delete",
    "stop": "/runs/{run}/do/stop",
    **{f"many-{tab}": f"/runs/{{many}}/?tab={tab}" for tab in RUN_TABS},
    "launching": "/runs/{launching}/",
    "done": "/runs/{done}/",
    "failed": "/runs/{failed}/",
    "compare": "/compare?ids={run},{many}",
    "compare-none": "/compare",
    "boards": "/boards",
    "board": "/boards/{board}",
    "board-new": "/boards/new",
    "board-edit": "/boards/{board}/edit",
    "fleet": "/fleet",
    "fleet-filtered": "/fleet?backend=modal&owner=olga",
    "spend": "/spend",
    "spend-month": "/spend?days=30&owner=olga",
    "admin": "/admin/",
}
"""Screens of a site with runs."""
WIDTH_ONLY = {"admin", "done", "run-checkpoints", "run-logs", "run-settings"}
"""Only the width is checked of Django's admin, and of pages that others have all parts of."""
WITHOUT_SIGN_IN = {"sign-in": "/login", "choose": "/account/choose/MQ/none"}


@pytest.fixture(scope="module")
def runs(site: Site) -> dict[str, str]:
    runs = {
        "run": site.python(EVALUATED),
        "many": site.seed(
            "name='A run with a very long name that shows how the page wraps and truncates it',"
            "state='degraded', committed=40, total_rounds=400, sync_every=10, replicas=24"
        ),
        "launching": site.seed("name='Just launched', state='provisioning', committed=0"),
        "done": site.seed("name='Done', state='succeeded', committed=20, age_s=9000"),
        "failed": site.seed(
            "name='Bad bucket', state='failed', committed=0, reason='AccessDenied'"
        ),
    }
    runs["sweep"] = site.python(
        "from tests.browser import seed_sweeps\n"
        "print(seed_sweeps.sweep(seed.user('olga', 'operator'), [2.5, None, 2.25]).pk)"
    )
    runs["board"] = site.python(
        "from runs.actions import boards\n"
        "from runs.models import Run\n"
        "runs = [str(run.pk) for run in Run.objects.order_by('created_at')[:3]]\n"
        "owner = seed.user('admin', 'admin')\n"
        "print(boards.save(owner, name='Three at once', runs=runs).pk)"
    )
    site.python("\n".join(ALERTS).format(run=runs["many"]))
    site.python(
        "from runs.actions.budgets import save_budget\n"
        "save_budget(scope='tag', name='a-tag-' * 6, period='month', amount_usd=1e6, warn_at=0.8,"
        " actor=seed.user('admin', 'admin'))\n"
        "from tests.browser import seed_spend\n"
        "seed_spend.fleet(seed.user('olga', 'operator'), seed.user('oscar', 'operator'))"
    )
    return runs


@pytest.fixture(scope="module")
def shared(contexts: ContextPool, site: Site, sign_ins: dict[str, Any]) -> Iterator[Window]:
    """A window with one page of an administrator, which shows one screen after another."""
    window = Window(pool=contexts, server=site, name="axe", signed_in=sign_ins)
    window.open("/", user="admin")
    yield window
    window.close()


@contextlib.contextmanager
def screen(window: Window, request: pytest.FixtureRequest, path: str) -> Iterator[Page]:
    """Show ``path`` on the page of the window; report its errors and keep its picture as the
    fixture `window` does."""
    window.name = request.node.name
    window.screenshots = request.config.getoption("--screenshots")
    page = window.contexts[-1].pages[-1]
    show(page, path)
    try:
        yield page
    except BaseException:
        window.shoot_failed()
        page.goto(BLANK)
        window.errors.clear()
        raise
    errors, window.errors[:] = window.errors[:], []
    assert errors == []


def show(page: Page, path: str) -> None:
    """Load an address, unless it is another tab of the run that is shown: follow its link."""
    run, _, tab = path.partition("?tab=")
    is_shown = urlsplit(page.url).path == run
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    if tab in RUN_TABS and is_shown:
        page.locator(f"nav [data-tab-link={tab}]").click()
        expect(page.locator(f"[data-panel={tab}]")).to_be_visible()
    else:
        page.goto(path)


def settle(page: Page) -> None:
    """Wait until the page has loaded; `networkidle` never fires while a stream is open."""
    page.wait_for_load_state("load")
    page.wait_for_timeout(300)


def examine(
    window: Window, page: Page, name: str, contrast: Contrast | None, *, part: str = "html"
) -> list[str]:
    """Check the width of a page; return the problems that axe finds in ``part``, a selector.
    Without ``contrast`` only the width is checked."""
    settle(page)
    window.fits(page, f"axe-{name}", *WIDTHS, full=name != "api-docs")
    if contrast is None:
        return []
    if name in REPEATED:
        page.evaluate(REMOVE_OTHERS, REPEATED[name])
    page.evaluate(REMOVE_EQUAL, part)
    # The tabs of "many" have the headings and landmarks of those of "run".
    between = part != "html" and not name.startswith("many-")
    return problems_in_both_schemes(page, name, contrast, part, between=between)


REPEATED = {"api-docs": ".api-operation", "prices": "section[aria-labelledby^=prices-]"}
"""Selectors of the equal parts of long pages. All but the first are removed before axe begins,
which takes as long as the page is."""
REMOVE_OTHERS = """
(selector) => [...document.querySelectorAll(selector)].slice(1).forEach((one) => one.remove())
"""
REMOVE_EQUAL = """
(selector) => {
    const shape = (element) => element.outerHTML
        .replace(/>[^<]*[^<\\s][^<]*</g, ">text<").replace(/[0-9a-f]{8,}|[0-9]+/g, "0");
    const root = document.querySelector(selector);
    for (const parent of [root, ...root.querySelectorAll("*")]) {
        if (!parent.isConnected || parent.children.length < 8 || parent.tagName === "TR") continue;
        const seen = new Set();
        for (const child of [...parent.children]) {
            const found = shape(child);
            if (seen.has(found)) child.remove();
            seen.add(found);
        }
    }
}
"""
"""Removes rows of long tables, lists and drawings that differ in texts and numbers only. An empty
text is another shape: names are missing there."""


def part_of(name: str) -> str:
    """The part of a screen that no other screen shows. The tabs of a run share their page."""
    of, _, tab = name.partition("-")
    is_tab = of in ("run", "many") and tab in RUN_TABS and tab != "overview"
    if name == "api-docs":  # the frame has many links to the other parts
        return REPEATED[name]
    return f"[data-panel={tab}]" if is_tab else "html"


@matrix("name", SCREENS, fast=("run-overview", "new", "sweep", "credentials"))
def test_screen(
    shared: Window,
    runs: dict[str, str],
    name: str,
    contrast: Contrast,
    request: pytest.FixtureRequest,
) -> None:
    with screen(shared, request, SCREENS[name].format(**runs)) as page:
        if name not in ("admin", "api-docs"):  # whose text mentions UTC
            check_times(page)
        texts = None if name in WIDTH_ONLY else contrast
        problems = examine(shared, page, name, texts, part=part_of(name))
        assert not problems, "\n".join(problems)
        if name in ("not-found", "admin"):
            shared.errors[:] = [error for error in shared.errors if "404" not in error]


@matrix("action", ["Stop", "Delete"], fast=1)
def test_bulk_confirmation_screen(
    window: Window, runs: dict[str, str], action: str, contrast: Contrast
) -> None:
    """The response to a POST of the list; these pages have no address."""
    page = window.open("/", user="admin")
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name=action).click()
    page.get_by_role("heading", level=1, name=re.compile(f"{action} .*run")).wait_for()
    problems = examine(window, page, f"bulk-{action.lower()}", contrast)
    assert not problems, "\n".join(problems)


@matrix("name", WITHOUT_SIGN_IN, fast=1)
def test_screen_without_sign_in(window: Window, name: str, contrast: Contrast) -> None:
    page = window.open(WITHOUT_SIGN_IN[name], user=None)
    problems = examine(window, page, name, contrast)
    assert not problems, "\n".join(problems)


ERROR_500 = """
from django.test import RequestFactory
from django.views.defaults import server_error
print(server_error(RequestFactory().get("/")).content.decode())
"""


@matrix("status", [403, 500], fast=1)
def test_error_screen(window: Window, site: Site, status: int, contrast: Contrast) -> None:
    page = window.open(BLANK, user="vera")
    if status == 500:  # no page of the site fails
        body = site.python(ERROR_500)
        page.route(
            "**/settings/people",
            lambda route: route.fulfill(status=500, body=body, content_type="text/html"),
        )
    page.goto(f"{site.url}/settings/people")
    expect(page.locator(".code")).to_contain_text(str(status))
    problems = examine(window, page, f"error-{status}", contrast)
    assert not problems, "\n".join(problems)
    window.errors[:] = [error for error in window.errors if str(status) not in error]


@pytest.mark.slow
def test_what_opens_on_the_run_page(
    window: Window, runs: dict[str, str], contrast: Contrast
) -> None:
    page = window.open(f"/runs/{runs['many']}/?drawer=replica-23", user="admin")
    drawer, dialog = page.locator(".drawer"), page.locator("dialog[open]")
    problems: list[str] = []

    def check(name: str, part: str) -> None:
        problems.extend(problems_in_both_schemes(page, name, contrast, part))

    expect(drawer.get_by_role("heading", name="Replica 23", exact=True)).to_be_visible()
    check("drawer of a replica", ".drawer")
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    page.locator(".event-link").first.click()
    expect(drawer.locator("h2:visible")).to_contain_text("event")
    check("drawer of an event", ".drawer")
    page.keyboard.press("Escape")
    for name in ("Stop", "Add panel"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(dialog.get_by_role("button")).not_to_have_count(0)
        check(name, "dialog[open]")
        page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    expect(dialog.get_by_role("option")).not_to_have_count(0)
    check("palette", "dialog[open]")
    page.keyboard.press("Escape")
    page.locator("[data-bell]").click()
    expect(page.locator(".bell-panel .alert-text").first).to_be_visible()
    check("bell", ".bell-panel")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_menus_of_the_list(window: Window, runs: dict[str, str], contrast: Contrast) -> None:
    page = window.open("/", user="admin")
    problems = []
    for name in ("Filters", "Columns", "Views", "Keys"):
        if name == "Keys":
            page.keyboard.press("?")
        else:
            page.locator(".find summary", has_text=name).click()
        settle(page)
        part = "dialog[open]" if name == "Keys" else ".find .drop[open]"
        expect(page.locator(part)).to_be_visible()
        problems += problems_in_both_schemes(page, name, contrast, part, between=name == "Filters")
        page.keyboard.press("Escape")
        expect(page.locator(part)).to_have_count(0)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_users_end_to_end(window: Window, site: Site) -> None:
    """An administrator adds a user, who sets a password with the link and signs in."""
    page = window.open("/settings/people", user="admin")
    page.get_by_label("Name", exact=True).fill("nora")
    page.get_by_role("radio", name="operator").check()
    page.get_by_role("button", name="Add", exact=True).click()
    field = page.get_by_role("textbox", name="Link")
    expect(field).to_have_value(re.compile("^http"))
    link = field.input_value()
    window.shoot(page, "users-link")
    own = window.open(link.removeprefix(site.url), user=None)
    own.get_by_label("New password", exact=True).fill(PASSWORD)
    own.get_by_label("Repeat new password").fill(PASSWORD)
    own.get_by_role("button", name="Set password").click()
    own.get_by_label("Username").fill("nora")
    own.get_by_label("Password").fill(PASSWORD)
    own.get_by_role("button", name="Sign in").click()
    own.wait_for_url(f"{site.url}/")
    row = page.get_by_role("listitem").filter(has_text="nora")
    row.get_by_text("Manage").click()
    window.shoot(page, "users-manage")
    row.get_by_role("button", name="Deactivate").click()
    page.get_by_text("nora is signed out").wait_for()
    own.goto("/")
    expect_address(own, "/login")


def test_alert_appears_live_and_is_acknowledged(window: Window, site: Site) -> None:
    run = site.seed("name='With alerts'")
    page = window.open(f"/runs/{run}/?tab=activity&source=alert")
    page.get_by_text("No matching activity.").wait_for()
    page.locator("[data-conn][data-state=live]").wait_for()
    site.python("\n".join(ALERTS).format(run=run))
    header = site.python(
        "import json; from runs.queries import selectors; from runs.models import Run\n"
        f"print(json.dumps(selectors.run_header(Run.objects.get(pk='{run}'))))"
    )
    site.publish(run, run=json.loads(header))
    page.get_by_role("button", name="Acknowledge").first.wait_for()
    expect(page.locator("[data-alert-count] [data-n]")).to_have_text("3")
    window.shoot(page, "alerts")
    page.get_by_role("button", name="Acknowledge").first.click()
    page.get_by_text("acknowledged by olga").first.wait_for()
    expect(page.locator("[data-alert-count] [data-n]")).to_have_text("2")


def test_every_page_template_has_a_test() -> None:
    """Every template of a whole page is in :data:`PAGE_TEMPLATES`."""
    root = Path(__file__).parents[2] / "templates"
    pages = {
        p.relative_to(root).as_posix()
        for p in root.rglob("*.html")
        if p.parts[len(root.parts)] != "admin" and "{% extends" in p.read_text()
    }
    assert pages - PAGE_TEMPLATES == set()


PAGE_TEMPLATES = {
    "runs/list.html",
    "runs/detail.html",
    "runs/new.html",
    "runs/replica.html",
    "runs/pool_add.html",
    "runs/delete.html",
    "runs/bulk_confirm.html",
    "runs/bulk_delete.html",
    "planner/planner.html",
    "fleet/fleet.html",
    "spend/spend.html",
    "sweeps/sweep.html",
    "sweeps/sweeps.html",
    "compare/compare.html",
    "boards/board.html",
    "boards/boards.html",
    "boards/edit.html",
    "account/tokens.html",
    "account/password.html",
    "account/users.html",
    "account/choose_password.html",
    "alerts/alerts.html",
    "api/docs.html",
    "search/search.html",
    "search/confirm.html",  # test_frame.py
    "settings/backends.html",
    "settings/base.html",
    "settings/budgets.html",
    "settings/credential.html",
    "settings/credentials.html",
    "settings/price.html",
    "settings/prices.html",
    "runs/evaluation_plan.html",
    "settings/tracker.html",
    "settings/trackers.html",
    "settings/traffic.html",
    "settings/webhooks.html",
    "auth/login.html",
    "404.html",
    "403.html",
    "403_csrf.html",
    "500.html",
    "error.html",
    "solo.html",
    "styleguide/styleguide.html",  # test_styleguide.py
    "auth/setup.html",  # test_first_start.py
    "storage_trouble.html",  # the error page with another text: test_storage_errors.py
}
"""Templates of whole pages that have a test."""
