"""Answers that arrive late do not replace newer ones: `static/js/lib/requests.js`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import REPOSITORY

pytestmark = pytest.mark.browser

# Inside the bundle the functions have no names.
SOURCE = (REPOSITORY / "static/js/lib/requests.js").read_text().replace("export ", "")
UNTIL = """
const until = async (is) => { while (!is()) await new Promise((next) => setTimeout(next)); };
const answers = [], request = () => new Promise((answer) => answers.push(answer));
"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page."""
    with browser.new_context() as context:
        yield context.new_page()


def test_an_answer_is_dropped_once_another_request_is_due(page: Page) -> None:
    shown = page.evaluate(
        f"""async () => {{ {SOURCE} {UNTIL}
            const shown = [], ask = asker(request, (answer) => shown.push(answer));
            ask(0);
            await until(() => answers.length === 1);
            ask(50);
            answers[0]("of earlier input");
            await until(() => answers.length === 2);
            answers[1]("newest");
            await until(() => shown.includes("newest"));
            return shown;
        }}"""
    )
    assert shown == ["newest"]


def test_an_answer_after_that_of_a_later_request_is_dropped(page: Page) -> None:
    found = page.evaluate(
        f"""async () => {{ {SOURCE} {UNTIL}
            const ask = inOrder(request);
            const asked = [ask(), ask(), ask()];
            answers[1]("second");
            await asked[1];
            answers[0]("first");
            answers[2]("third");
            return await Promise.all(asked);
        }}"""
    )
    assert found == [None, "second", "third"]
