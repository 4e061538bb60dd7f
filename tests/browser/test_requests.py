"""Answers that arrive late do not replace newer ones (`static/js/lib/requests.js`), and pages that
share a stream (`stream.js`) miss nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import REPOSITORY

pytestmark = pytest.mark.browser

# Inside the bundle the functions have no names.
SOURCE, STREAM, FRAMES = (
    (REPOSITORY / "static/js/lib" / name).read_text().replace("export ", "")
    for name in ("requests.js", "stream.js", "frames.js")
)
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


def test_a_call_during_a_request_gets_the_answer_of_the_next_one(page: Page) -> None:
    found = page.evaluate(
        f"""async () => {{ {SOURCE} {UNTIL}
            const ask = oneAtATime(request);
            const asked = [ask(), ask(), ask()];
            const begun = answers.length;
            answers[0](Promise.reject("lost"));
            await asked[0].catch(() => {{}});
            await new Promise((next) => setTimeout(next)); // the next request has begun
            answers[1]?.("second");
            const [first, ...others] = await Promise.allSettled(asked);
            asked.push(ask());
            answers.at(-1)("third");
            return [begun, first.reason, ...others.map((one) => one.value), await asked[3]];
        }}"""
    )
    assert found == [1, "lost", "second", "second", "third"]


@pytest.mark.parametrize("positions", [["5-1", "", "6-0"], ["", "6-0", "5-1"]])
def test_a_page_without_a_position_takes_that_of_no_other(page: Page, positions: list[str]) -> None:
    addresses = page.evaluate(
        f"""async (positions) => {{ {STREAM} {UNTIL}
            const addresses = [];
            class EventSource {{
                constructor(address) {{ addresses.push(address); }}
                addEventListener() {{}}
                close() {{}}
            }}
            const stream = new Stream();
            for (const after of positions) {{
                const port = {{ postMessage() {{}} }};
                stream.add(port);
                port.onmessage({{ data: {{ address: "/stream", topic: "alerts", after }} }});
            }}
            await until(() => addresses.length);
            return addresses;
        }}""",
        positions,
    )
    assert addresses == ["/stream?topic=alerts%3A5-1"]


def test_streamed_changes_are_drawn_in_a_frame_and_at_most_every_interval(page: Page) -> None:
    found = page.evaluate(
        f"""() => {{
            let now = 0;
            const due = [], drawn = [];
            const performance = {{ now: () => now }};
            const setTimeout = (work, delay_ms) => due.push([now + delay_ms, work]);
            const requestAnimationFrame = (work) => due.push([now + 16, work]);
            {FRAMES}
            const draw = atMostEvery(250, () => drawn.push(now));
            for (now = 0; now <= 1100; now++) {{
                if (now % 60 === 0 && now <= 660) draw();
                for (const one of due.splice(0)) one[0] <= now ? one[1]() : due.push(one);
            }}
            return drawn;
        }}"""
    )
    assert found == [16, 282, 548, 814]  # the last draws what came until 660
