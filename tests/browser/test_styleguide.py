"""Pictures of the style guide, in both themes, are those of ``tests/browser/pictures``.

A changed picture is a changed component: look at both, and store the new one with
``UPDATE_PICTURES=1 pytest tests/browser/test_styleguide.py``. No server runs; the page and its
files come from here.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.contrib.messages.storage.cookie import CookieStorage
from django.test import RequestFactory
from PIL import Image, ImageChops, ImageFilter
from playwright.sync_api import Browser, Page, Route

from dashboard.views.styleguide import NOW, styleguide
from tests.browser.accessibility import describe, violations
from tests.browser.conftest import ARTIFACTS, PATIENCE_MS
from tests.matrix import matrix

pytestmark = pytest.mark.browser

STATIC = Path(__file__).parents[2] / "static"
PICTURES = Path(__file__).parent / "pictures"
ORIGIN = "http://styleguide.test"
DIFFERENT = 48
"""Difference of a channel that counts, after a blur: above that of another antialiasing."""
DIFFERENT_SHARE = 0.002
"""Share of pixels that can differ: about half a line of text."""


@pytest.fixture(scope="module")
def guide(browser: Browser) -> Iterator[Page]:
    request = RequestFactory().get("/styleguide")
    request.user = AnonymousUser()
    request._messages = CookieStorage(request)  # type: ignore[attr-defined]
    content = styleguide(request).content

    def answer(route: Route) -> None:
        path = route.request.url.removeprefix(ORIGIN)
        if path == "/styleguide":
            route.fulfill(body=content, content_type="text/html")
        elif path.startswith("/static/"):
            route.fulfill(path=STATIC / path.removeprefix("/static/"))
        else:
            route.abort()

    with browser.new_context(
        viewport={"width": 1080, "height": 900},
        reduced_motion="reduce",
        color_scheme="light",
        timezone_id="UTC",
    ) as context:
        context.set_default_timeout(PATIENCE_MS)
        context.route("**/*", answer)
        page = context.new_page()
        page.clock.set_fixed_time(NOW)
        page.goto(f"{ORIGIN}/styleguide")
        page.evaluate("document.fonts.ready.then(() => null)")
        with forced_states(page):
            yield page


@contextlib.contextmanager
def forced_states(page: Page) -> Iterator[None]:
    """Show the elements with ``data-force`` as with the pointer over them, or with the focus of
    the keyboard."""
    cdp = page.context.new_cdp_session(page)
    cdp.send("DOM.enable")
    cdp.send("CSS.enable")
    root = cdp.send("DOM.getDocument")["root"]["nodeId"]
    for state, classes in (("hover", ["hover"]), ("focus", ["focus", "focus-visible"])):
        query = {"nodeId": root, "selector": f"[data-force={state}]"}
        for node in cdp.send("DOM.querySelectorAll", query)["nodeIds"]:
            forced = {"nodeId": node, "forcedPseudoClasses": classes}
            cdp.send("CSS.forcePseudoState", forced)
    yield
    cdp.detach()


@matrix("scheme", ["light", "dark"], fast=1)
def test_components_look_as_before(guide: Page, scheme: Any) -> None:
    guide.emulate_media(color_scheme=scheme)
    found = violations(guide)
    assert not found, describe(found)
    picture = Image.open(io.BytesIO(guide.screenshot(full_page=True))).convert("RGB")
    stored = PICTURES / f"styleguide-{scheme}.webp"
    if os.environ.get("UPDATE_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        picture.quantize(128).convert("RGB").save(stored, lossless=True, quality=80, method=4)
    before = Image.open(stored).convert("RGB")
    share = difference(before, picture)
    if share > DIFFERENT_SHARE:
        ARTIFACTS.mkdir(exist_ok=True)
        picture.save(ARTIFACTS / f"{stored.stem}.png")
    assert share <= DIFFERENT_SHARE, f"{share:.2%} differ: see test-artifacts/{stored.stem}.png"


def difference(before: Image.Image, after: Image.Image) -> float:
    """The share of pixels that differ; 1 if the sizes differ."""
    if before.size != after.size:
        return 1.0
    blur = ImageFilter.BoxBlur(1)
    change = ImageChops.difference(before.filter(blur), after.filter(blur)).convert("L")
    histogram = change.histogram()
    return sum(histogram[DIFFERENT:]) / (before.width * before.height)


def test_a_changed_component_is_noticed() -> None:
    before = Image.new("RGB", (400, 300), "white")
    after = before.copy()
    after.paste("navy", (10, 10, 40, 30))
    assert difference(before, before.copy()) == 0
    assert difference(before, after) > DIFFERENT_SHARE
    assert difference(before, before.resize((400, 301))) == 1
