"""The submit form in a browser: what it begins with, what it trains, and its dry run."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PASSWORD, Site, Window

pytestmark = pytest.mark.browser

LLAMA = {
    "kind": "huggingface", "model": "", "revision": "", "config": {"model_type": "llama"},
    "tokenizer": "", "context": 64, "data": "file:///data/text.parquet", "data_format": "parquet",
    "data_config": "", "data_split": "train", "text_column": "body", "documents": 7,
    "eval_tokens": 512,
}  # fmt: skip


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
        "for name in ('On call, who is called in many more words than fit', 'chat'):\n"
        "    Webhook.objects.create(name=name, url='https://example.org', kinds=['finished'], "
        "created_at=timezone.now())"
    )
    return run


def wide_as_the_window(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")]
)
def test_a_clone_is_chosen_in_the_form(window: Window, llama: str, width: int, scheme: str) -> None:
    page = window.open("/runs/new", width=width, scheme=scheme)
    expect(page.get_by_label("Begin with")).to_be_visible()
    expect(page.get_by_label("Like", exact=True)).to_be_hidden()
    page.get_by_role("radio", name="Clone of a run").check()
    choose(page, "Like", "A llama · 12 rounds")
    page.get_by_role("button", name="Fill in").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("A llama (copy)")
    assert page.url.endswith(f"/runs/new?clone={llama}")
    expect(page.get_by_role("radio", name="Hugging Face")).to_be_checked()
    expect(page.get_by_label("Or a configuration")).to_have_value(re.compile("llama"))
    expect(page.get_by_label("Column", exact=True)).to_have_value("body")
    expect(page.get_by_role("radio", name="mini")).to_be_hidden()
    window.shoot(page, f"submit-clone-{width}-{scheme}")
    assert wide_as_the_window(page)


def choose(page: Page, label: str, run: str) -> None:
    """The run whose option begins like that; who owns it and since when comes behind."""
    field = page.get_by_label(label, exact=True)
    option = field.locator("option", has_text=run).first
    field.select_option(value=option.get_attribute("value"))


def test_enter_in_find_looks_for_a_run_and_keeps_what_is_typed(window: Window, site: Site) -> None:
    site.seed("name='A needle', state='succeeded', committed=2")
    page = window.open("/runs/new", width=360)
    page.get_by_label("Name", exact=True).fill("Half typed")
    page.get_by_text("Clone of a run").click()
    page.get_by_label("Find a run").locator("visible=true").fill("needle")
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 found.")).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value("Half typed")
    choose(page, "Like", "A needle · 2 rounds")
    bar = page.get_by_title("To the whole estimate, and Launch")
    expect(bar).to_be_in_viewport()  # what it amounts to is in sight on a telephone too
    expect(bar).to_contain_text("parameters")
    bar.click()
    expect(page.get_by_role("button", name="Launch")).to_be_in_viewport()


def test_a_fork_names_run_and_round(window: Window, llama: str) -> None:
    page = window.open("/runs/new", width=1280)
    page.get_by_role("radio", name="Fork of a run").check()
    choose(page, "Weights of", "A llama · 12 rounds")
    page.get_by_label("After round").fill("5")
    window.shoot(page, "submit-source-fork", full=False)
    page.get_by_role("button", name="Fill in").click()
    expect(page.get_by_role("heading", name=re.compile("weights of A llama"))).to_be_visible()
    assert page.url.endswith(f"?fork={llama}&round=5")


def test_what_is_trained_decides_what_is_asked(window: Window) -> None:
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
    model.blur()  # it has to be there, and nobody typed anything
    expect(page.locator("#id_model_error")).to_contain_text("found neither")
    page.get_by_role("radio", name="Byte-level GPT").check()
    expect(split).to_be_hidden()
    expect(page.get_by_label("Evaluation text")).to_be_visible()


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")]
)
def test_a_dry_run_launches_nothing(
    window: Window, site: Site, llama: str, width: int, scheme: str
) -> None:
    page = window.open("/runs/new", width=width, scheme=scheme)
    page.get_by_label("Name", exact=True).fill("Only tried")
    page.get_by_role("checkbox", name="chat").uncheck()
    page.get_by_role("button", name="Dry run").dblclick()
    said = page.locator("[data-dry-run]")
    expect(said).to_be_focused()
    expect(said).to_contain_text("Nothing was launched")
    expect(said).to_contain_text("4 × local cpu")
    said.get_by_text("as JSON").click()
    expect(said.get_by_label("What would be launched")).to_contain_text('"name": "Only tried"')
    window.shoot(page, f"submit-dry-run-{width}-{scheme}")
    assert wide_as_the_window(page)
    expect(page.get_by_label("Name", exact=True)).to_have_value("Only tried")
    expect(page.get_by_role("checkbox", name="chat")).not_to_be_checked()
    assert count(site, "Only tried") == "0"


def test_enter_in_a_field_only_tries(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name", exact=True).fill("By Enter")
    page.keyboard.press("Enter")
    expect(page.locator("[data-dry-run]")).to_be_focused()
    assert count(site, "By Enter") == "0"
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("By Enter")
    assert count(site, "By Enter") == "1"


def test_a_dry_run_that_would_not_do_takes_the_focus(window: Window) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Local steps (H)").fill("0")
    page.get_by_role("button", name="Dry run").click()
    expect(page.locator("[data-summary]")).to_be_focused()
    expect(page.locator("[data-summary]")).to_contain_text("expected 1 or more, found 0")
    window.errors[:] = [e for e in window.errors if "422" not in e]


def test_what_was_typed_survives_signing_in_again(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name", exact=True).fill("Typed at length")
    page.get_by_role("button", name="Add a pool").click()
    page.get_by_role("spinbutton", name="Replicas").nth(1).fill("2")
    page.context.clear_cookies(name="sessionid")
    page.get_by_role("button", name="Launch").click()
    page.get_by_label("Username").fill("olga")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("Filled in as you sent it")).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value("Typed at length")
    expect(page.get_by_role("spinbutton", name="Replicas").nth(1)).to_have_value("2")
    assert count(site, "Typed at length") == "0"
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Typed at length")
    page.goto(f"{site.url}/runs/new")  # what has arrived is not filled in again
    expect(page.get_by_label("Name", exact=True)).to_have_value("Local demo")
    window.errors[:] = [e for e in window.errors if "403" not in e]
