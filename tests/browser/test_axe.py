"""Every screen under axe-core, in light and dark, with nothing, one and many on it; and each at
360 pixels, where nothing may reach over the edge.

axe finds what a machine can: names, roles, contrast, structure. A finding that it calls serious or
critical fails; the others are listed with the failure, to be looked at. What only a person finds
(order, meaning, alternatives that say something) is left to people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

from tests.browser.conftest import PASSWORD, Site, Window, serving

pytestmark = pytest.mark.browser

GRAVE = ("serious", "critical")
OVER_ALL = [
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
"""Alerts of all levels, open, over and acknowledged."""

RUN_TABS = (
    "overview", "rounds", "timeline", "replicas", "logs", "system", "checkpoints", "settings",
    "events", "alerts",
)  # fmt: skip
SCREENS = {
    "runs": "/",
    "runs-differing": "/?columns=state,name,loss,age&differ=1",
    "new": "/runs/new",
    "planner": "/planner",
    "tokens": "/account/tokens",
    "password": "/account/password",
    "people": "/people/",
    "not-found": "/nowhere",
    **{f"run-{tab}": f"/runs/{{run}}/?tab={tab}" for tab in RUN_TABS},
    "round": "/runs/{run}/?tab=rounds&round=5",
    "replica": "/runs/{run}/replicas/1/",
    "pool-add": "/runs/{run}/pools/add",
    "delete": "/runs/{failed}/delete",
    **{f"many-{tab}": f"/runs/{{many}}/?tab={tab}" for tab in RUN_TABS},
    "launching": "/runs/{launching}/",
    "failed": "/runs/{failed}/",
    "compare": "/compare?ids={run},{many}",
    "compare-none": "/compare",
    "admin": "/admin/",
}
"""Screens of a site with runs. The administration is Django's own, and is looked at for its width
alone."""
NOT_OURS = {"admin"}
EMPTY = {"runs": "/", "new": "/runs/new", "compare": "/compare", "people": "/people/"}
ALONE = {"sign-in": "/login", "choose": "/account/choose/MQ/none"}


@pytest.fixture(scope="module")
def runs(site: Site) -> dict[str, str]:
    made = {
        "run": site.seed("name='Local demo'"),
        "many": site.seed(
            "name='A run whose name somebody made very long indeed, to see what the page does',"
            "state='degraded', committed=40, total_rounds=400, sync_every=10, replicas=24"
        ),
        "launching": site.seed("name='Just launched', state='provisioning', committed=0"),
        "failed": site.seed(
            "name='Bad bucket', state='failed', committed=0, reason='AccessDenied'"
        ),
    }
    site.python("\n".join(OVER_ALL).format(run=made["many"]))
    return made


@pytest.fixture(scope="module")
def empty_site(
    tmp_path_factory: pytest.TempPathFactory, valkey: str, own_database: None
) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("empty"), valkey) as site:
        site.python("seed.user('admin', 'admin')")
        yield site


def settle(page: Page) -> None:
    """Until what the page asks for is there; the stream of a run page never ends."""
    page.wait_for_load_state("load")
    page.wait_for_timeout(300)


def findings(page: Page, options: str = "{}") -> list[dict[str, Any]]:
    page.evaluate(AXE_SCRIPT)
    found: list[dict[str, Any]] = page.evaluate(
        f"axe.run(document, {{resultTypes: ['violations'], ...{options}}}).then(r => r.violations)"
    )
    return found


def told(found: list[dict[str, Any]]) -> str:
    lines = []
    for one in found:
        lines.append(f"{one['impact']}: {one['id']}: {one['help']}")
        for node in one["nodes"][:4]:
            lines += [
                f"    {node['html'][:160]}",
                f"        {node.get('failureSummary', '')[:300]}",
            ]
    return "\n".join(lines)


def examine(page: Page, name: str, *, axe: bool = True) -> list[str]:
    """What is wrong with it: whole in light, colours again in dark, and its width at 360."""
    settle(page)
    wrong = []
    if axe:
        grave = [one for one in findings(page) if one["impact"] in GRAVE]
        wrong += [f"{name}, light:\n{told(grave)}"] if grave else []
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(50)
        grave = findings(page, "{runOnly: ['color-contrast']}")
        wrong += [f"{name}, dark:\n{told(grave)}"] if grave else []
    page.set_viewport_size({"width": 360, "height": 760})
    page.wait_for_timeout(100)
    wide = page.evaluate("document.documentElement.scrollWidth")
    wrong += [f"{name}: {wide} pixels wide at 360: {culprits(page)}"] if wide > 360 else []
    return wrong


def culprits(page: Page) -> Any:
    """What reaches furthest, whether or not something around it scrolls."""
    return page.evaluate(
        """[...document.querySelectorAll("body *")]
        .filter((e) => e.getBoundingClientRect().right > 361)
        .map((e) => e.tagName + "." + e.className).slice(0, 8)"""
    )


@pytest.mark.parametrize("name", SCREENS)
def test_screen(window: Window, runs: dict[str, str], name: str) -> None:
    page = window.open(SCREENS[name].format(**runs), user="admin")
    wrong = examine(page, name, axe=name not in NOT_OURS)
    window.shoot(page, f"axe-{name}")
    assert not wrong, "\n".join(wrong)
    if name in ("not-found", "admin"):
        window.errors[:] = [error for error in window.errors if "404" not in error]


@pytest.mark.parametrize("what", ["Stop", "Delete"])
def test_screen_that_asks_before_it_acts_on_many(
    window: Window, runs: dict[str, str], what: str
) -> None:
    """Answers to a POST of the list: no address leads there."""
    page = window.open("/", user="admin")
    page.get_by_label("Select all of this page").check()
    page.get_by_role("button", name=what).click()
    page.get_by_role("heading", level=1, name=re.compile(f"{what} .*run")).wait_for()
    wrong = examine(page, f"bulk {what}")
    window.shoot(page, f"axe-bulk-{what.lower()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ALONE)
def test_screen_for_nobody(window: Window, site: Site, name: str) -> None:
    page = window.open(ALONE[name], user=None)
    wrong = examine(page, name)
    window.shoot(page, f"axe-{name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", EMPTY)
def test_screen_with_nothing_on_it(
    window: Window, empty_site: Site, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "url", empty_site.url)
    monkeypatch.setattr(window, "signed_in", _empty_sign_ins)
    page = window.open(EMPTY[name], user="admin")
    wrong = examine(page, f"{name} with nothing")
    window.shoot(page, f"axe-empty-{name}")
    assert not wrong, "\n".join(wrong)


_empty_sign_ins: dict[str, Any] = {}


def test_what_opens_on_the_list(window: Window, runs: dict[str, str]) -> None:
    page = window.open("/", user="admin")
    wrong = []
    for name in ("Filters", "Columns", "Views", "Keys"):
        if name == "Keys":
            page.keyboard.press("?")
        else:
            page.locator(".find summary", has_text=name).click()
        settle(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            grave = [one for one in findings(page) if one["impact"] in GRAVE]
            wrong += [f"{name}, {scheme}:\n{told(grave)}"] if grave else []
        page.keyboard.press("Escape")
    assert not wrong, "\n".join(wrong)


def test_people_end_to_end(window: Window, site: Site) -> None:
    """An administrator adds somebody, who chooses a password under the link and signs in."""
    page = window.open("/people/", user="admin")
    page.get_by_label("Name", exact=True).fill("nora")
    page.get_by_role("radio", name="operator").check()
    page.get_by_role("button", name="Add", exact=True).click()
    link = page.get_by_role("textbox", name="Link").input_value()
    window.shoot(page, "people-link")
    theirs = window.open(link.removeprefix(site.url), user=None)
    theirs.get_by_label("New password", exact=True).fill(PASSWORD)
    theirs.get_by_label("New password again").fill(PASSWORD)
    theirs.get_by_role("button", name="Set password").click()
    theirs.get_by_label("Username").fill("nora")
    theirs.get_by_label("Password").fill(PASSWORD)
    theirs.get_by_role("button", name="Sign in").click()
    theirs.wait_for_url(f"{site.url}/")
    row = page.get_by_role("listitem").filter(has_text="nora")
    row.get_by_text("Manage").click()
    window.shoot(page, "people-manage")
    row.get_by_role("button", name="Deactivate").click()
    page.get_by_text("nora is signed out").wait_for()
    theirs.goto("/")
    assert "/login" in theirs.url


def test_an_alert_comes_live_and_is_acknowledged(window: Window, site: Site) -> None:
    run = site.seed("name='With alerts'")
    page = window.open(f"/runs/{run}/?tab=alerts")
    page.get_by_text("Nothing has called for attention").wait_for()
    page.locator("[data-conn][data-state=live]").wait_for()
    site.python("\n".join(OVER_ALL).format(run=run))
    header = site.python(
        "import json; from runs.queries import selectors; from runs.models import Run\n"
        f"print(json.dumps(selectors.run_header(Run.objects.get(pk='{run}'))))"
    )
    import json

    site.publish(run, run=json.loads(header))
    page.get_by_role("button", name="Acknowledge").first.wait_for()
    assert page.locator("[data-alert-count] [data-n]").inner_text() == "3"
    window.shoot(page, "alerts")
    page.get_by_role("button", name="Acknowledge").first.click()
    page.get_by_text("seen by olga").first.wait_for()
    assert page.locator("[data-alert-count] [data-n]").inner_text() == "2"


def test_no_screen_is_forgotten() -> None:
    """Every whole page there is a template for is in a list above."""
    root = Path(__file__).parents[2] / "templates"
    whole = {
        p.relative_to(root).as_posix()
        for p in root.rglob("*.html")
        if p.parts[len(root.parts)] != "admin" and "{% extends" in p.read_text()
    }
    assert whole - SEEN == set()


SEEN = {
    "runs/list.html", "runs/detail.html", "runs/new.html", "runs/replica.html",
    "runs/pool_add.html", "runs/delete.html",
    "runs/bulk_stop.html", "runs/bulk_delete.html",
    "planner/planner.html", "compare/compare.html", "account/tokens.html",
    "account/password.html", "account/people.html", "account/choose_password.html",
    "auth/login.html",
    "404.html", "403.html", "403_csrf.html", "500.html", "error.html", "solo.html",
    "auth/setup.html",  # test_first_start.py
    "storage_trouble.html",  # the error page with another text: test_storage_errors.py
}  # fmt: skip
"""Templates of whole pages that the lists above show."""
