"""Static files: none from other hosts, no inline code, vendored files unchanged."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
from django.contrib.staticfiles import finders
from django.test import Client

from dashboard.presentation.badges import BREAKERS, LOOKS
from runs.states import ContributionState, ReplicaState, RoundState, RunState

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "static"
VENDOR = STATIC / "vendor"
TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))
OWN = [p for p in STATIC.rglob("*") if p.is_file() and VENDOR not in p.parents]
MANIFEST = json.loads((STATIC / "dist/manifest.json").read_text())
UPLOT = "vendor/uplot-1.6.32/uPlot"


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


BARE_TIME = re.compile(r"\|(?:date|time|timesince|timeuntil)\b(?!:[\"']c[\"'])|{% now\b")
"""A time as text. ISO 8601 (``c``) is for attributes."""


def test_times_are_written_by_one_component() -> None:
    """The tags of ``ui`` write ``<time>``, which the browser changes to its zone."""
    assert BARE_TIME.search('{{ at|date:"Y-m-d" }}')
    for path in TEMPLATES:
        text = re.sub(r"<time\b.*?</time>", "", path.read_text(), flags=re.DOTALL)
        assert not BARE_TIME.search(text), path.name


@pytest.mark.parametrize("path", TEMPLATES + OWN, ids=lambda p: p.name)
def test_pages_load_nothing_from_other_hosts(path: Path) -> None:
    text = path.read_bytes().decode(errors="ignore").replace("http://www.w3.org/2000/svg", "")
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
    bundle = "".join(path.read_text() for path in (STATIC / "dist").glob("*.js"))
    for icon, tone in LOOKS.values():
        assert f'["{icon}","{tone}"]' in bundle


def test_every_icon_that_is_used_exists() -> None:
    drawn = set(re.findall(r'<symbol id="([\w-]+)"', (STATIC / "icons.svg").read_text()))
    used = {row[0] for row in (*LOOKS.values(), *BREAKERS.values())}
    for path in TEMPLATES:
        used |= set(re.findall(r"{% icon '([\w-]+)' %}", path.read_text()))
    for path in (STATIC / "js").rglob("*.js"):
        used |= set(re.findall(r'icon\("([\w-]+)"\)', path.read_text()))
    assert used <= drawn


def test_tones_have_a_colour() -> None:
    css = (STATIC / "css/tokens.css").read_text()
    for tone in {tone for _, tone in LOOKS.values()}:
        assert f"--s-{tone}:" in css


def served_scripts() -> set[str]:
    """Every script that WhiteNoise serves, except those of Django's admin."""
    return {
        name
        for finder in finders.get_finders()
        for name, _ in finder.list(None)
        if name.endswith((".js", ".mjs")) and not name.startswith("admin/")
    }


def test_only_built_and_vendored_scripts_are_served() -> None:
    built = {f"dist/{path.name}" for path in (STATIC / "dist").glob("*.js")}
    assert served_scripts() == built | {f"{UPLOT}.iife.min.js"}


def with_parents(template: Path) -> str:
    """The text of a template, after that of the templates that it extends."""
    text = template.read_text()
    parent = re.search(r'{% extends "([^"]+)" %}', text)
    above = ROOT / "templates" / parent[1] if parent else template
    return text if above == template else with_parents(above) + text


def page_of(template: Path) -> str:
    found = re.findall(r"{% block page %}([\w-]+){%", with_parents(template))
    return found[-1] if found else "base"


def files_of(template: Path) -> list[str]:
    """Paths in ``static/`` of the scripts and sheets that the page of a template loads at once."""
    text = with_parents(template)
    charts = f"{UPLOT}.iife.min.js", f"{UPLOT}.min.css", "css/charts.css"
    return [
        *re.findall(r"{% static '(css/[\w-]+\.css)' %}", text),
        *(charts if "partials/chart_head.html" in text else ()),
        *(f"dist/{name}" for name in MANIFEST["pages"][page_of(template)]),
    ]


PAGES = [
    path
    for path in TEMPLATES
    if "{% block content %}" in path.read_text() and "templates/admin" not in path.as_posix()
]
LIMITS = {"runs/list.html": 45_000, "runs/detail.html": 90_000, "runs/replica.html": 90_000}
"""Template -> bytes of scripts and styles, compressed; other pages have 60,000."""


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_scripts_and_styles_of_a_page_stay_small(path: Path) -> None:
    sizes = {name: len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in files_of(path)}
    limit = LIMITS.get(path.relative_to(ROOT / "templates").as_posix(), 60_000)
    assert sum(sizes.values()) <= limit, sizes


def test_what_every_page_loads_stays_small() -> None:
    sizes = {
        name: len(gzip.compress((STATIC / "dist" / name).read_bytes(), 9))
        for name in MANIFEST["pages"]["base"]
    }
    assert sum(sizes.values()) <= 15_000, sizes


def test_the_fonts_stay_small() -> None:
    sizes = {path.name: path.stat().st_size for path in VENDOR.rglob("*.woff2")}
    assert sum(sizes.values()) <= 60_000, sizes


def test_pages_load_only_served_scripts() -> None:
    """A template can load vendored scripts in addition to that of base.html."""
    result = {
        n for path in TEMPLATES for n in re.findall(r'<script[^>]* src="([^"]*)"', path.read_text())
    }
    assert result == {f"{{% static '{UPLOT}.iife.min.js' %}}"}


def test_every_page_has_its_script() -> None:
    assert {page_of(path) for path in PAGES} == set(MANIFEST["pages"])


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


def lone_classes(sheet: str) -> set[str]:
    """Classes that a sheet styles wherever they appear: ``x`` of ``.x:hover``, not of ``.y .x``."""
    rules = re.sub(r"/\*.*?\*/", "", sheet, flags=re.S)
    selectors = ",".join(re.findall(r"([^{};@]+)\{", rules)).split(",")
    matches = (re.fullmatch(r"\.([\w-]+)(::?[\w-]+)*", one.strip()) for one in selectors)
    return {found[1] for found in matches if found}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_sheets_of_a_page_do_not_style_the_same_class(path: Path) -> None:
    """A sheet changes a part of another one only inside its own parts, e.g. ``.runs .tag``."""
    owner: dict[str, str] = {}
    for name in files_of(path):
        if name.startswith("css/"):
            for one in lone_classes((STATIC / name).read_text()):
                assert owner.setdefault(one, name) == name, f".{one} is in {owner[one]} and {name}"


SHEETS = [*PAGE_STYLES, STATIC / "css/base.css"]
SPACE = r"(?<![-\w])((?:margin|padding)(?:-[\w-]+)?|(?:row-|column-)?gap): ([^;{}]+)"
SCALE = re.findall(r"--space-(\d+): \1px;", (STATIC / "css/tokens.css").read_text())


@pytest.mark.parametrize("path", SHEETS, ids=lambda p: p.name)
def test_styles_use_the_tokens(path: Path) -> None:
    """Sizes of type, weights, radii, levels and colours come from tokens.css alone, and so does a
    margin, padding or gap of the scale of spaces."""
    sheet = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    allowed = {
        "font-size": r"0|var\(--t-\d\d\)|[\d.]+em|inherit",
        "font": r"inherit|(500 |600 )?var\(--t-\d\d\)/[\d.]+ var\(--(font|mono)\)",
        "font-weight": r"400|500|600|inherit",
        "border-radius": r"var\(--radius-(4|6|10|full)\)|50%|0|inherit",
        "z-index": r"var\(--z-\w+\)|auto",
    }
    wrong = [
        f"{name}: {value}"
        for name, value in re.findall(r"(?<![-\w])([\w-]+): ([^;{}]+)", sheet)
        if name in allowed and not re.fullmatch(allowed[name], value.strip())
    ]
    wrong += [
        f"{name}: {value}"
        for name, value in re.findall(SPACE, sheet)
        if re.search(rf"(?<![-\w.])({'|'.join(SCALE)})px", value)
    ]
    assert wrong == []
    assert re.findall(r"(?<!%23)#[0-9a-f]{3,8}\b", sheet.replace("#000", "")) == []


@pytest.mark.parametrize("path", SHEETS, ids=lambda p: p.name)
def test_styles_are_in_a_layer(path: Path) -> None:
    sheet = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    outside = re.sub(
        r"@layer \w+ (\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\})", "", sheet
    )
    assert re.sub(r"@import [^;]+ layer\([\w.]+\);", "", outside).strip() == ""


def test_every_token_that_is_used_exists() -> None:
    sheets = [path.read_text() for path in (STATIC / "css").glob("*.css")]
    defined = {name for sheet in sheets for name in re.findall(r"(--[\w-]+):", sheet)}
    used = {name for sheet in sheets for name in re.findall(r"var\((--[\w-]+)\)", sheet)}
    scripts = "".join(path.read_text() for path in (STATIC / "js").rglob("*.js"))
    used |= set(re.findall(r'"(--[\w-]+)"', scripts))
    used -= set(re.findall(r'setProperty\("(--[\w-]+)"', scripts))
    assert used <= defined


def test_bare_selectors_are_found() -> None:
    sheet = "a:not(.z), .b c:is(d, e) > f {} @media (x) { details[open] > .icon { x: y } }"
    sheet += "h:has(.i) j {}"
    assert leftmost_compounds(sheet) == ["a", ".b", "details[open]", "h:has(.i)"]
