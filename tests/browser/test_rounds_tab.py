"""The rounds tab: outcomes have the same names in heatmap, table and detail; lanes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import BLANK, Site, Window, eventually, expect_address, next_frame

pytestmark = pytest.mark.browser

HEATMAP = '[data-heatmap="large"]'

SEED = """
from tests.browser import seed_rounds
run = seed.run(seed.user('olga', 'operator'), name='Rounds', replicas={replicas}, committed=12)
seed_rounds.late_and_healing(run)
if {parts} > 1:
    seed_rounds.fragments(run, {parts})
print(run.pk)
"""


def make(site: Site, *, parts: int = 1, replicas: int = 4) -> str:
    return site.python(SEED.format(parts=parts, replicas=replicas))


def expect_announced(page: Page, right: int, down: int, text: str) -> None:
    """Move the cursor ``right`` and ``down`` cells from the origin, and expect ``text``."""
    page.locator(f"{HEATMAP} canvas").first.focus()
    page.keyboard.press("Escape")
    for _ in range(right):
        page.keyboard.press("ArrowRight")
    for _ in range(down):
        page.keyboard.press("ArrowDown")
    expect(page.locator(f"{HEATMAP} .heat-announce")).to_have_text(text)


def test_late_healing_missing_and_open_are_distinguished(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site)}/?tab=rounds")
    expect(page.locator(f"{HEATMAP} .heat-announce")).to_contain_text("12 of 20 rounds")
    expect_announced(
        page, 9, 2, "Round 9, replica 2: late by 2.4 s (committed without this replica)"
    )
    expect_announced(page, 8, 2, "Round 8, replica 2: missing (no contribution)")
    expect_announced(page, 7, 3, "Round 7, replica 3: healing (catching up)")
    legend = page.locator(f"{HEATMAP} .heat-legend")
    for word in ("included", "late", "refused", "round void", "healing", "missing"):
        expect(legend).to_contain_text(word)
    table = page.locator("[data-rounds-table] tbody tr")
    expect(table.filter(has_text="1 late by 2.4 s")).to_have_count(1)
    expect(table.filter(has_text="1 healing")).to_have_count(2)
    page.keyboard.press("Enter")
    detail = page.locator("[data-round-detail]")
    expect(detail.get_by_role("row").filter(has_text="Replica 3")).to_contain_text(
        "healingcatching up"
    )
    for number in (8, 9):
        detail.get_by_role("button", name="Next round").click()
        expect(detail.get_by_role("heading", level=2)).to_have_text(f"Round {number}")
    expect(detail.get_by_role("row").filter(has_text="Replica 2")).to_contain_text("late by 2.4 s")
    # The plan, which selects the contributors, does not exist yet in an open round.
    for number in (10, 11, 12, 13):
        detail.get_by_role("button", name="Next round").click()
        expect(detail.get_by_role("heading", level=2)).to_have_text(f"Round {number}")
    expect(detail).to_contain_text("2 of 4 uploaded")
    expect(table.filter(has_text="collecting")).to_contain_text("2 of 4 uploaded")
    expect(table.filter(has_text="committed").first).not_to_contain_text("uploaded")


def test_older_rounds_have_the_same_outcomes_and_the_cursor_keeps_its_round(
    window: Window, site: Site
) -> None:
    run = make(site)
    page = window.open(BLANK)
    page.route(
        lambda url: "snapshot.json" in url,
        lambda route: route.fulfill(
            json=(body := route.fetch().json()) | {"rounds": body["rounds"][10:]}
        ),
    )
    held: list[Route] = []
    page.route(lambda url: "heatmap.json?below=11" in url, lambda route: held.append(route))
    page.goto(f"/runs/{run}/?tab=rounds")
    announcement = page.locator(f"{HEATMAP} .heat-announce")
    expect(announcement).to_contain_text("12 of 20 rounds")
    expect_announced(page, 1, 2, "Round 11, replica 2: included")
    eventually(page, lambda: held, bool)
    held[0].continue_()

    def one_left() -> str:
        page.keyboard.press("ArrowLeft")
        next_frame(page)
        return announcement.inner_text()

    left = eventually(page, one_left, lambda text: "Round 11" not in text)
    assert left == "Round 10, replica 2: included"
    expect_announced(page, 9, 2, "Round 9, replica 2: late by 2.4 s")
    expect_announced(page, 7, 3, "Round 7, replica 3: healing (catching up)")


def test_fragments_have_lanes(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site, parts=4)}/?tab=rounds")
    choice = page.get_by_label("Fragments")
    expect(choice).to_have_value("lanes")
    # Replica 2: the first lane of the third column is round 9, the second lane is round 10.
    why = "committed without this replica"
    expect_announced(page, 3, 8, f"Round 9, fragment 0, replica 2: late by 2.4 s ({why})")
    expect_announced(page, 3, 9, "Round 10, fragment 1, replica 2: included")
    page.keyboard.press("Enter")
    expect(page.locator("[data-round-detail]")).to_contain_text("1 (0 to 3)")
    window.fits(page, "rounds-lanes", 1440)
    choice.select_option("2")
    next_frame(page)
    expect_address(page, "fragment=2")
    expect_announced(page, 2, 3, "Round 7, fragment 2, replica 3: healing (catching up)")
    choice.select_option("all")
    next_frame(page)
    expect_announced(page, 7, 3, "Round 7, fragment 2, replica 3: healing (catching up)")
    page.reload()
    expect(choice).to_have_value("all")


def test_many_replicas_have_one_row_for_all_fragments(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site, parts=4, replicas=40)}/?tab=rounds")
    expect(page.get_by_label("Fragments")).to_have_value("all")


def test_contributions_are_cards_on_narrow_screens(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site)}/?tab=rounds&round=9", width=360)
    table = page.locator("[data-round-detail] table")
    expect(table).to_be_visible()
    window.fits(page, "rounds-narrow", 360)
    assert table.evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")
    expect(table.locator('td[data-label="Payload"]').first).to_be_visible()
    assert table.locator("tbody tr").first.evaluate("r => getComputedStyle(r).display") == "grid"
