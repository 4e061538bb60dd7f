"""Static files: none from other hosts, no inline code, vendored files unchanged."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest
from django.contrib.staticfiles import finders
from django.test import Client

from dashboard.presentation.badges import LOOKS
from runs.states import ContributionState, ReplicaState, RoundState, RunState

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "static"
VENDOR = STATIC / "vendor"
TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))
OWN = [p for p in STATIC.rglob("*") if p.is_file() and VENDOR not in p.parents]


def test_vendored_files_are_listed_and_unchanged() -> None:
    listed = dict(
        re.findall(
            r"^\| `([^`]+)` .*\| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.M
        )
    )
    result = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert result == listed


def test_every_vendored_package_has_its_licence() -> None:
    for folder in VENDOR.iterdir():
        if folder.is_dir():
            assert (folder / "LICENSE").read_text().strip()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_templates_have_no_inline_code(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\sstyle\s*=", text)
    assert not re.search(r"\son\w+\s*=", text)
    assert "<style" not in text
    for script in re.findall(r"<script[^>]*>", text):
        assert "src=" in script


@pytest.mark.parametrize("path", TEMPLATES + OWN, ids=lambda p: p.name)
def test_pages_load_nothing_from_other_hosts(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://", text)


@pytest.mark.django_db
def test_the_csp_allows_only_this_server(client: Client) -> None:
    policy = client.get("/login", follow=True)["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "style-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy


def test_every_state_has_a_badge() -> None:
    for states in (RunState, ReplicaState, RoundState, ContributionState):
        assert set(states.values) <= set(LOOKS)


def test_the_browser_reads_the_same_badges() -> None:
    assert 'import LOOKS from "./looks.json"' in (STATIC / "js/lib/states.js").read_text()
    bundle = (STATIC / "dist/app.js").read_text()
    for icon, tone in LOOKS.values():
        assert f'["{icon}","{tone}"]' in bundle


def test_every_icon_that_is_used_exists() -> None:
    drawn = set(re.findall(r'<symbol id="([\w-]+)"', (STATIC / "icons.svg").read_text()))
    used = {icon for icon, _ in LOOKS.values()}
    for path in TEMPLATES:
        used |= set(re.findall(r"{% icon '([\w-]+)' %}", path.read_text()))
    for path in (STATIC / "js").rglob("*.js"):
        used |= set(re.findall(r'icon\("([\w-]+)"\)', path.read_text()))
    assert used <= drawn


def test_tones_have_a_colour() -> None:
    css = (STATIC / "css/tokens.css").read_text()
    for tone in {tone for _, tone in LOOKS.values()}:
        assert f"--s-{tone}:" in css


def served_scripts() -> dict[str, bytes]:
    """Name -> content of every script that WhiteNoise serves, except those of Django's admin."""
    return {
        name: storage.open(name).read()
        for finder in finders.get_finders()
        for name, storage in finder.list(None)
        if name.endswith((".js", ".mjs")) and not name.startswith("admin/")
    }


def test_all_scripts_together_stay_small() -> None:
    """75 KB compressed, own and vendored: with its styles, the run page has less than 90 KB."""
    sizes = {name: len(gzip.compress(content, 9)) for name, content in served_scripts().items()}
    own = {"dist/app.js", "dist/live_worker.js"}
    assert set(sizes) == own | {"vendor/uplot-1.6.32/uPlot.iife.min.js"}
    assert sum(sizes.values()) <= 75_000, sizes


def test_pages_load_only_served_scripts() -> None:
    """A template can load vendored scripts in addition to the one of base.html."""
    result = {
        n for path in TEMPLATES for n in re.findall(r'<script[^>]* src="([^"]*)"', path.read_text())
    }
    assert result == {"{% script %}", "{% static 'vendor/uplot-1.6.32/uPlot.iife.min.js' %}"}


def test_every_page_has_its_scripts() -> None:
    named = {
        n for path in TEMPLATES for n in re.findall(r"{% block page %}([\w-]+){%", path.read_text())
    }
    source = (STATIC / "js/app.js").read_text()
    known = re.findall(r'^  "?([\w-]+)"?: (\w+Page),$', source, re.M)
    assert {page for page, _ in known} == named
    assert all(f"import {{ {function} }} from" in source for _, function in known)


def leftmost_compounds(sheet: str) -> list[str]:
    """The first compound of every selector: ``details[open]`` of ``details[open] > .icon``."""
    rules = re.sub(r"/\*.*?\*/", "", sheet, flags=re.S)
    found = []
    for prelude in re.findall(r"([^{};]+)\{", rules):
        if prelude.lstrip().startswith("@"):
            continue
        # :not() does not narrow a selector; other arguments, as of :has(), stay part of it.
        flat = re.sub(r":not\([^()]*\)", "", prelude)
        flat = re.sub(r"\([^()]*\)", lambda part: re.sub(r"[\s,>+~]", "_", part[0]), flat)
        found += [re.split(r"[\s>+~]", selector.strip())[0] for selector in flat.split(",")]
    return [one for one in found if not re.fullmatch(r"from|to|[\d.]+%", one)]


PAGE_STYLES = sorted(
    path
    for path in (STATIC / "css").glob("*.css")
    if path.name not in ("base.css", "tokens.css", "admin.css")
)
FRAME = re.compile(r"\.(menu|menu-body|menu-name|topbar|topbar-in|topnav|brand)(?![\w-])")


@pytest.mark.parametrize("path", PAGE_STYLES, ids=lambda p: p.name)
def test_page_styles_do_not_change_elements_of_the_frame(path: Path) -> None:
    """Only base.css styles bare elements and the frame: other sheets apply to parts of a page."""
    compounds = leftmost_compounds(path.read_text())
    assert compounds
    assert [one for one in compounds if not re.search(r"[.#]|\[data-", one)] == []
    assert [one for one in compounds if FRAME.search(one)] == []


def test_bare_selectors_are_found() -> None:
    sheet = "a:not(.z), .b c:is(d, e) > f {} @media (x) { details[open] > .icon { x: y } }"
    sheet += "h:has(.i) j {}"
    assert leftmost_compounds(sheet) == ["a", ".b", "details[open]", "h:has(.i)"]
