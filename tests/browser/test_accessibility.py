"""Violations of any impact count; the contrast of one text of each look is examined, on one page
of those that show it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.accessibility import Contrast, problems_in_both_schemes
from tests.browser.conftest import PATIENCE_MS
from tests.matrix import matrix

pytestmark = pytest.mark.browser

STYLE = """<!doctype html><html lang=en><title>Texts</title><style>
body { background: white; color: black } .pale { color: #bbb } .box { background: #767676 }
@media (prefers-color-scheme: dark) { body { background: black; color: #333 }
  .box { color: white } }
</style><main><h1 class=box>Title</h1>"""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(color_scheme="light") as context:
        context.set_default_timeout(PATIENCE_MS)
        yield context.new_page()


@matrix(
    ("text", "schemes"),
    [
        ("<p class=box>both</p>", []),
        ("<p class=pale>light</p>", ["light"]),
        ("<p>dark</p>", ["dark"]),
        ("<p class=box><b class=pale>both</b></p>", ["light", "dark"]),
        ("<p class=box>good</p><p class=box style='color: #999'>bad</p>", ["light", "dark"]),
        ("<p hidden class=pale>none</p>", []),
        ("<img src=data:,>", ["light"]),  # critical: without a name
        ("<h4 class=box>Skips a level</h4>", ["light"]),  # moderate
        ("<table class=box><tr><th></th></tr><tr><td>1</td></tr></table>", ["light"]),  # minor
    ],
    fast=[
        ("<p>dark</p>", ["dark"]),
        ("<p class=box><b class=pale>both</b></p>", ["light", "dark"]),
        ("<p hidden class=pale>none</p>", []),
    ],
)
def test_violations_of_any_impact_are_found(page: Page, text: str, schemes: list[str]) -> None:
    page.set_content(STYLE + text)
    problems = problems_in_both_schemes(page, "texts", Contrast())
    assert [one.partition(":")[0] for one in problems] == [f"texts, {one}" for one in schemes]


def test_a_look_is_examined_once(page: Page) -> None:
    contrast = Contrast()
    for text, classes, count in (
        ("<p class=box>a</p>", True, 2),
        ("<p class=box>b</p>", True, 0),
        ("<p>c</p>", True, 1),
        ("<p class='box other'>d</p>", True, 1),
        ("<p class=box>e</p>", False, 2),
        ("<p class='box other'>f</p>", False, 0),
    ):
        page.set_content(STYLE + text)
        assert contrast.violations(page, classes=classes) == []
        examined = page.evaluate("chosen.map((one) => one.textContent)")
        assert len(examined) == count, examined


def test_a_text_with_too_little_contrast_is_found_again(page: Page) -> None:
    contrast = Contrast()
    page.set_content(f"{STYLE}<p class=pale>pale</p>")
    for _ in range(2):
        assert [one["id"] for one in contrast.violations(page)] == ["color-contrast"]
