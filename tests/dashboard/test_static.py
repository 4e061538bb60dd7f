"""What the pages are made of: nothing from elsewhere, nothing inline, vendored files unchanged."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest
from django.test import Client

from dashboard.states import LOOKS
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
    found = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert found == listed


def test_every_vendored_package_brings_its_licence() -> None:
    for folder in VENDOR.iterdir():
        if folder.is_dir():
            assert (folder / "LICENSE").read_text().strip()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_templates_hold_nothing_inline(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\sstyle\s*=", text)
    assert not re.search(r"\son\w+\s*=", text)
    assert "<style" not in text
    for script in re.findall(r"<script[^>]*>", text):
        assert "src=" in script


@pytest.mark.parametrize("path", TEMPLATES + OWN, ids=lambda p: p.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://", text)


@pytest.mark.django_db
def test_the_policy_allows_only_ourselves(client: Client) -> None:
    policy = client.get("/login", follow=True)["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "style-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy


def test_every_state_has_a_look() -> None:
    for states in (RunState, ReplicaState, RoundState, ContributionState):
        assert set(states.values) <= set(LOOKS)


def test_looks_in_the_browser_are_the_same() -> None:
    script = (STATIC / "js/lib/states.js").read_text()
    table = script[script.index("LOOKS = {") : script.index("};")]
    found = {s: (i, t) for s, i, t in re.findall(r'(\w+): \["(\w+)", "(\w+)"\]', table)}
    assert found == LOOKS


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


def imported(script: Path, seen: set[Path]) -> set[Path]:
    """A script of ours and all that it imports."""
    script = script.resolve()
    if script not in seen:
        seen.add(script)
        for name in re.findall(r'^import [^;]*?"(\.[^"]+)";', script.read_text(), re.M):
            imported(script.parent / name, seen)
    return seen


def test_what_a_page_loads_of_ours_stays_small() -> None:
    """60 KB compressed: quick on a bad line, without anything that has to be built."""
    names = {
        n for path in TEMPLATES for n in re.findall(r"{% static '(js/[^']+)' %}", path.read_text())
    }
    assert "js/run.js" in names
    for name in names:
        own = [path for path in imported(STATIC / name, set()) if VENDOR not in path.parents]
        assert len(own) > 1
        assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in own) < 60_000, name
