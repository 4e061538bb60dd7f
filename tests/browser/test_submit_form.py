"""The submit form: errors on blur, the live estimate, one run per click."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Site, Window, expect_address, tab_to
from tests.browser.submit_page import open_section

pytestmark = pytest.mark.browser


def test_errors_appear_at_the_field_and_disappear(window: Window) -> None:
    page = window.open("/runs/new")
    quorum = page.get_by_label("Minimum quorum")
    expect(quorum).to_be_hidden()
    search = page.get_by_role("searchbox", name="Search settings")
    search.fill("batch size")
    index = page.get_by_role("navigation", name="Sections")
    index.get_by_role("link", name="Quorum, stragglers and elasticity").click()
    expect(search).to_be_empty()
    expect(quorum).to_be_in_viewport()
    quorum.fill("9")
    quorum.blur()
    error = page.locator("#id_min_quorum_error")
    expect(error).to_contain_text("Expected at most the target of 4 replicas, found 9")
    expect(quorum).to_have_attribute("aria-invalid", "true")
    for described in ("error", "helptext"):
        expect(quorum).to_have_attribute(
            "aria-describedby", re.compile(rf"\bid_min_quorum_{described}\b")
        )
    quorum.fill("2")
    quorum.blur()
    expect(error).to_be_hidden()
    expect(quorum).not_to_have_attribute("aria-invalid", re.compile(""))


def test_estimate_follows_the_form(window: Window) -> None:
    page = window.open("/runs/new")
    tokens = page.locator('[data-estimate] [data-e="tokens"]')
    expect(tokens).to_have_text(re.compile(r"\d"))
    before = tokens.inner_text()
    page.get_by_role("radio", name="mini").check()
    expect(page.locator('[data-estimate] [data-e="parameters"]')).to_have_text("4.79M")
    expect(tokens).not_to_have_text(before)
    page.get_by_role("spinbutton", name="Replicas").fill("1")
    expect(page.locator("[data-e-reduction]")).to_be_hidden()
    page.get_by_text("Effective JSON").click()
    expect(page.locator("[data-json]")).to_contain_text('"num_replicas": 1')


def test_data_of_users_and_token_shards_ask_for_their_uri(window: Window) -> None:
    page = window.open("/runs/new")
    expect(page.get_by_label("Data URI")).to_be_hidden()
    page.get_by_role("radio", name="My own text").check()
    expect(page.get_by_label("Data URI")).to_be_visible()
    coverage = page.get_by_label("Coverage of an epoch")
    expect(coverage).to_be_hidden()
    page.get_by_role("radio", name="Token shards").check()
    expect(coverage).to_be_visible()
    coverage.select_option("units")
    uri = page.get_by_label("Data URI")
    uri.fill("s3://bucket/tokens")
    page.get_by_text("Effective JSON").click()
    expect(page.locator("[data-json]")).to_contain_text('"data_coverage": "units"')
    window.shoot(page, "submit-token-shards")


def test_evaluations_are_added_and_removed_before_the_launch(window: Window) -> None:
    page = window.open("/runs/new")
    page.locator("#id_name").fill("Kept")
    open_section(page, "Evaluations")
    page.get_by_role("button", name="Add an evaluation").click()
    row = page.get_by_role("group", name="Evaluation 1")
    expect(row).to_be_in_viewport()
    expect(page.locator("#id_name")).to_have_value("Kept")
    row.get_by_label("Name").fill("bench")
    row.get_by_label("When").select_option("2")
    page.get_by_text("Effective JSON").click()
    expect(page.locator("[data-json]")).to_contain_text('"every": 2')
    page.get_by_role("button", name="Add an evaluation").click()
    expect(page.get_by_role("group", name="Evaluation 2")).to_be_visible()
    window.fits(page, "submit-evaluations", 390, 1280)
    page.get_by_role("button", name="Remove evaluation 1").click()
    expect(page.get_by_role("group", name="Evaluation 2")).to_have_count(0)
    expect(row.get_by_label("Name")).to_have_value("")


@pytest.mark.slow
def test_a_run_is_submitted_by_keyboard_alone_after_a_refusal(window: Window) -> None:
    """A refused form keeps its input and focuses the summary."""
    page = window.open("/runs/new")
    rate = page.get_by_label("Outer learning rate", exact=True)
    launch = page.get_by_role("button", name="Launch")
    tab_to(page, page.get_by_label("Name", exact=True))
    page.keyboard.type("Kept")
    tab_to(page, rate)
    page.keyboard.type("-1")
    tab_to(page, launch)
    page.keyboard.press("Enter")
    summary = page.locator("[data-summary]")
    expect(summary).to_be_focused()
    expect(summary).to_contain_text("expected 0 or more, found -1")
    window.shoot(page, "submit-errors")
    expect(page.get_by_label("Name", exact=True)).to_have_value("Kept")
    tab_to(page, summary.get_by_role("link", name="Outer learning rate", exact=True))
    page.keyboard.press("Enter")
    expect_address(page, "#id_outer_lr")
    expect(rate).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("0.6")
    tab_to(page, launch)
    page.keyboard.press("Space")
    expect(page.get_by_role("heading", level=1)).to_have_text("Kept")
    window.errors[:] = [e for e in window.errors if "422" not in e]


def test_double_click_creates_one_run(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name", exact=True).fill("Pressed twice")
    page.get_by_role("button", name="Launch").dblclick()
    expect(page.get_by_role("heading", level=1)).to_have_text("Pressed twice")
    count = "from runs.models import Run; print(Run.objects.filter(name='Pressed twice').count())"
    assert site.python(count) == "1"


def test_own_code_is_a_zip_and_a_function(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    function = page.get_by_role("textbox", name="Function")
    expect(function).to_be_hidden()
    page.get_by_role("radio", name="My own code").check()
    expect(page.get_by_role("radio", name="mini")).to_be_hidden()
    page.get_by_label("Name", exact=True).fill("Own code")
    function.fill("train.build")
    function.blur()
    expect(page.locator("#id_function_error")).to_contain_text("Expected 'package.module:function'")
    function.fill("train:build")
    expect(page.locator('[data-estimate] [data-e="parameters"]')).to_be_hidden()
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("train.py", "def build(**given): ...")
    code = {"name": "mine.zip", "mimeType": "application/zip", "buffer": zipped.getvalue()}
    page.get_by_label("Code", exact=True).set_input_files(code)
    page.get_by_label("Local steps (H)").fill("0")
    page.get_by_role("button", name="Launch").click()
    expect(page.locator("[data-archive-note]")).to_contain_text("Uploaded: 1 file")
    window.shoot(page, "submit-own-code")
    page.get_by_label("Local steps (H)").fill("90")
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Own code")
    kept = "from runs.models import Run; print(Run.objects.get(name='Own code').archive.sha256)"
    assert site.python(kept) == hashlib.sha256(zipped.getvalue()).hexdigest()
    window.errors[:] = [e for e in window.errors if "422" not in e]
