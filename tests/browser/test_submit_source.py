"""The submit form: templates, clones and forks, the fields of a workload, and the dry run."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PASSWORD, Site, Window, expect_address
from tests.browser.submit_page import open_section

pytestmark = pytest.mark.browser

LLAMA = {
    "kind": "huggingface",
    "model": "",
    "revision": "",
    "config": {"model_type": "llama"},
    "tokenizer": "",
    "context": 64,
    "data": "file:///data/text.parquet",
    "data_format": "parquet",
    "data_config": "",
    "data_split": "train",
    "text_column": "body",
    "documents": 7,
    "eval_tokens": 512,
}


def count(site: Site, name: str) -> str:
    return site.python(
        f"from runs.models import Run; print(Run.objects.filter(name={name!r}).count())"
    )


@pytest.fixture(scope="module")
def llama(site: Site) -> str:
    run = site.seed("name='A llama'")
    site.python(
        "from django.utils import timezone\nfrom runs.models import Checkpoint, Run, Webhook\n"
        f"Run.objects.filter(pk={run!r}).update(workload={LLAMA!r})\n"
        f"Checkpoint.objects.create(run_id={run!r}, round=5, key='k', size_bytes=1, digest='d', "
        "created_at=timezone.now())\n"
        "for name in ('On call, a webhook with a name that is too long to fit', 'chat'):\n"
        "    Webhook.objects.create(name=name, url='https://example.org', kinds=['finished'], "
        "created_at=timezone.now())"
    )
    return run


def test_clone_is_selected_in_the_form(window: Window, llama: str) -> None:
    page = window.open("/runs/new", width=360)
    open_section(page, "Source")
    expect(page.get_by_label("Template", exact=True)).to_be_visible()
    expect(page.get_by_label("Run to clone")).to_be_hidden()
    page.get_by_role("radio", name="Clone of a run").check()
    choose(page, "Run to clone", "A llama · 12 rounds")
    page.get_by_role("button", name="Fill in", exact=True).click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("A llama (copy)")
    expect_address(page, f"/runs/new?clone={llama}")
    open_section(page, "Model and data")
    expect(page.get_by_role("radio", name="Hugging Face")).to_be_checked()
    expect(page.get_by_label("Configuration")).to_have_value(re.compile("llama"))
    expect(page.get_by_label("Column", exact=True)).to_have_value("body")
    expect(page.get_by_role("radio", name="mini")).to_be_hidden()
    window.fits(page, "submit-clone", 360, 1280)


def choose(page: Page, label: str, run: str) -> None:
    """Select the option that contains ``run``; options also show owner and age."""
    field = page.get_by_label(label, exact=True)
    option = field.locator("option", has_text=run).first
    expect(option).to_be_attached()
    field.select_option(value=option.get_attribute("value"))


def test_enter_in_the_search_field_keeps_other_input(window: Window, site: Site) -> None:
    site.seed("name='A needle', state='succeeded', committed=2")
    page = window.open("/runs/new", width=360)
    page.get_by_label("Name", exact=True).fill("Half typed")
    open_section(page, "Source")
    page.get_by_text("Clone of a run").click()
    page.get_by_label("Find a run").locator("visible=true").fill("needle")
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 found.")).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value("Half typed")
    choose(page, "Run to clone", "A needle · 2 rounds")
    bar = page.get_by_title("Go to the full estimate")
    expect(bar).to_be_in_viewport()  # the summary stays visible on narrow screens
    expect(bar).to_contain_text("tokens")
    bar.click()
    expect(page.get_by_role("heading", name="This run will")).to_be_in_viewport()


def test_fork_has_run_and_round(window: Window, llama: str) -> None:
    page = window.open("/runs/new", width=1280)
    open_section(page, "Source")
    page.get_by_role("radio", name="Fork of a run").check()
    choose(page, "Run to fork", "A llama · 12 rounds")
    page.get_by_label("After round").fill("5")
    window.shoot(page, "submit-source-fork", full=False)
    page.get_by_role("button", name="Fill in", exact=True).click()
    expect(page.get_by_role("heading", name=re.compile("weights of A llama"))).to_be_visible()
    expect_address(page, f"?fork={llama}&round=5")


def test_fields_follow_the_workload(window: Window) -> None:
    page = window.open("/runs/new", width=1280)
    model, split = page.get_by_label("Model", exact=True), page.get_by_label("Split")
    expect(model).to_be_hidden()
    page.get_by_role("radio", name="Hugging Face").check()
    expect(model).to_be_visible()
    expect(split).to_be_hidden()
    page.get_by_role("radio", name="My own text").check()
    expect(split).to_be_visible()
    expect(page.get_by_label("Evaluation text")).to_be_hidden()
    model.focus()
    model.blur()  # a required field that is empty
    expect(page.locator("#id_model_error")).to_contain_text("found neither")
    page.get_by_role("radio", name="Byte-level GPT").check()
    expect(split).to_be_hidden()
    expect(page.get_by_label("Evaluation text")).to_be_visible()


def test_dry_run_launches_nothing(window: Window, site: Site, llama: str) -> None:
    page = window.open("/runs/new", width=360)
    page.get_by_label("Name", exact=True).fill("Dry run only")
    open_section(page, "Notifications and trackers")
    page.get_by_role("checkbox", name="chat").uncheck()
    page.get_by_role("button", name="Dry run").dblclick()
    result = page.locator("[data-dry-run]")
    expect(result).to_be_focused()
    expect(result).to_contain_text("Nothing was launched")
    expect(result).to_contain_text("4 × local cpu")
    result.get_by_text("as JSON").click()
    expect(result.get_by_label("Launch request")).to_contain_text('"name": "Dry run only"')
    window.fits(page, "submit-dry-run", 360, 1280)
    expect(page.get_by_label("Name", exact=True)).to_have_value("Dry run only")
    expect(page.get_by_role("checkbox", name="chat")).not_to_be_checked()
    assert count(site, "Dry run only") == "0"


def test_enter_in_a_field_is_a_dry_run(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    steps = page.get_by_label("Local steps (H)")
    steps.fill("0")
    page.get_by_role("button", name="Dry run").click()
    expect(page.locator("[data-summary]")).to_be_focused()
    expect(page.locator("[data-summary]")).to_contain_text("expected 1 or more, found 0")
    window.errors[:] = [e for e in window.errors if "422" not in e]
    steps.fill("40")
    page.get_by_label("Name", exact=True).fill("By Enter")
    page.keyboard.press("Enter")
    expect(page.locator("[data-dry-run]")).to_be_focused()
    assert count(site, "By Enter") == "0"
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("By Enter")
    assert count(site, "By Enter") == "1"


@pytest.mark.slow
def test_input_survives_an_expired_session(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name", exact=True).fill("Typed at length")
    page.get_by_role("button", name="Add a pool").click()
    page.get_by_role("spinbutton", name="Replicas").nth(1).fill("2")
    page.context.clear_cookies(name="sessionid")
    page.get_by_role("button", name="Launch").click()
    page.get_by_label("Username").fill("olga")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("Your entries from before")).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value("Typed at length")
    expect(page.get_by_role("spinbutton", name="Replicas").nth(1)).to_have_value("2")
    assert count(site, "Typed at length") == "0"
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Typed at length")
    page.wait_for_load_state()  # its script deletes the input
    page.goto(f"{site.url}/runs/new")  # submitted input is not restored
    expect(page.get_by_label("Name", exact=True)).to_have_value(re.compile(r"Local demo( \d+)?"))
    window.errors[:] = [e for e in window.errors if "403" not in e]
