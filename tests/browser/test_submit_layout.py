"""The layout of the submit form: estimate and *Launch* in sight, the frame unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Window, overflow
from tests.browser.submit_page import open_all

pytestmark = pytest.mark.browser

OUT_OF_SIGHT = """async () => {
    const shown = (name) => [...document.querySelectorAll(name)].some((element) => {
        const box = element.getBoundingClientRect();
        if (!box.height || box.top < 0 || box.bottom > innerHeight) return false;
        const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        return element === top || element.contains(top) || top?.contains(element);
    });
    const missing = [];
    for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight / 2) {
        scrollTo(0, y);
        await new Promise((resolve) => requestAnimationFrame(resolve));
        for (const name of ["[data-launch]", '[data-e="tokens"]', '[data-e="usd_h"]'])
            if (!shown(name)) missing.push(`${name} at ${scrollY}`);
    }
    return missing;
}"""


def test_estimate_and_launch_are_in_sight_at_every_scroll_position(window: Window) -> None:
    page = window.open("/runs/new", width=390, height=844)
    open_all(page)
    for width, height in ((390, 844), (1000, 700), (1024, 640), (1280, 640), (1440, 900)):
        page.set_viewport_size({"width": width, "height": height})
        expect(page.get_by_role("button", name="Launch")).to_be_visible()
        assert overflow(page) <= 0
        assert page.evaluate("document.documentElement.scrollHeight") > 3 * height
        assert page.evaluate(OUT_OF_SIGHT) == [], (width, height)
        page.evaluate("scrollTo(0, 1500)")
        window.shoot(page, f"submit-scrolled-{width}", full=False)


def test_launch_of_the_narrow_bar_submits_the_form(window: Window) -> None:
    page = window.open("/runs/new", width=390, height=844)
    page.get_by_label("Name", exact=True).fill("From a phone")
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("From a phone")


def user_menu(page: Page) -> dict[str, Any]:
    page.locator(".topbar .menu:not(.topmenu) > summary").click()
    expect(page.locator(".topbar .menu:not(.topmenu)")).to_have_attribute("open", "")
    style: dict[str, Any] = page.evaluate(
        """() => {
            const menu = document.querySelector(".topbar .menu:not(.topmenu) > summary");
            const [text, icon] = [getComputedStyle(menu), getComputedStyle(menu.lastElementChild
                .previousElementSibling)];
            return {
                font: text.font, gap: text.gap, height: menu.offsetHeight, width: menu.offsetWidth,
                margin: text.margin, turned: icon.transform, icon: icon.margin,
            };
        }"""
    )
    return style


@pytest.mark.slow
def test_the_user_menu_looks_the_same_on_every_page(window: Window, site: Site) -> None:
    run = site.seed("name='Frame', committed=1")
    page = window.open("/", user="admin")
    expected = user_menu(page)
    for path in (
        "/runs/new",
        f"/runs/{run}",
        f"/compare?ids={run}",
        "/planner",
        "/settings/people",
    ):
        page.goto(path)
        assert user_menu(page) == expected, path
