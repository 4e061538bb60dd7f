"""Statements of the docs that code can verify: names, commands, limits, lists and examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.protocol.payload_size import CODEC_SHAPES
from diloco.protocol.settings import setting_fields
from executors.registry import BACKENDS
from runs.alerts.rules import KINDS
from scripts import settings_reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CURRENT = [path for path in DOCS if path.name != "CHANGELOG.md" and "adr" not in path.parts]
PRODUCT = ("archipelago", "dashboard", "diloco", "executors", "runs", "static/js", "templates")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _section(name: str, heading: str) -> str:
    """The text below ``heading``, up to the next heading of the same or a higher level."""
    level = len(heading) - len(heading.lstrip("#"))
    body = _text(name).partition(f"\n{heading}\n")[2]
    assert body, f"{name} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def test_the_settings_reference_is_current() -> None:
    assert settings_reference.stale() == []


def test_the_settings_reference_has_every_setting() -> None:
    text = _text("docs/reference/settings.md")
    assert re.findall(r"^\| `(\w+)` \| [^|`]+ \| `", text, re.MULTILINE) == [
        spec.name for spec in sorted(setting_fields(), key=_section_order)
    ]


def _section_order(spec: settings_reference.SettingSpec) -> int:
    return list(settings_reference.SECTIONS).index(spec.section)


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_commands_and_tests_exist(path: Path) -> None:
    text = path.read_text()
    for module in set(re.findall(r"python -m (diloco\.\w+)", text)):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for script in set(re.findall(r"python ((?:bench|scripts|examples)/[\w/]+\.py)", text)):
        assert (ROOT / script).exists(), script
    for name in set(re.findall(r"`(test_\w+)`", text)):
        result = any(f"def {name}(" in test.read_text() for test in (ROOT / "tests").rglob("*.py"))
        assert result, f"no test is named {name}"


def test_the_glossary_is_sorted_and_complete() -> None:
    terms = re.findall(r"^\| ([^|]+?) \|", _text("docs/glossary.md"), re.MULTILINE)[2:]
    assert terms == sorted(terms, key=str.lower)
    entries = {term for entry in terms for term in entry.split(", ")}
    assert entries >= {
        "island",
        "replica",
        "pool",
        "attempt",
        "incarnation",
        "rank",
        "rendezvous URI",
        "round",
        "fragment",
        "contribution",
        "quorum",
        "outer step",
    }


def test_the_readme_names_every_folder() -> None:
    tree = _section("README.md", "## Folders")
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    folders = {name.split("/")[0] for name in tracked if "/" in name and name[0] != "."}
    assert {folder for folder in folders if f"{folder}/" not in tree} <= {"requirements"}
    for package in ("diloco", "executors", "runs"):
        for child in sorted((ROOT / package).glob("*/__init__.py")):
            name = child.parent.name
            if name not in {*BACKENDS, "management", "migrations"}:
                assert f"{name}/" in tree, f"{package}/{name}/"


def test_the_table_of_backends_is_complete() -> None:
    for name in BACKENDS:
        assert f"(backends/{name}.md)" in _text("docs/backends.md")
        assert (ROOT / "docs" / "backends" / f"{name}.md").exists()


def test_the_table_of_codecs_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _section("docs/protocol.md", "## Payload format"), re.M)
    assert rows == list(CODEC_SHAPES)


def test_exit_codes() -> None:
    from diloco import exit_codes

    documented = re.findall(
        r"^\| (\d+) \|", _section("docs/protocol.md", "## Graceful shutdown"), re.MULTILINE
    )
    values = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    assert values <= {int(code) for code in documented}
    troubleshooting = re.findall(r"^\| (\d+) \|", _text("docs/troubleshooting.md"), re.MULTILINE)
    assert troubleshooting == documented


def test_decision_records_are_listed() -> None:
    index = _text("docs/adr/README.md")
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        assert f"- [{title}]({path.name})" in index, path.name


def test_the_request_limits_of_the_api() -> None:
    parser = _text("dashboard/api/document_text.py")
    assert "JSON_BYTES = 1_000_000" in parser and "TEXT_BYTES = 64_000" in parser
    limits = "1 MB for JSON, 64 KB for TOML and YAML, 20 MB for an archive"
    assert limits in _text("docs/api.md")


def test_the_example_of_the_planner() -> None:
    """The example in docs/planning.md is what the command prints."""
    example = _text("docs/planning.md").partition("```\n$ ")[2].partition("```")[0]
    command, _, expected = example.replace("\\\n", "").partition("\n")
    arguments = command.split()[1:]
    printed = subprocess.check_output([sys.executable, *arguments], cwd=ROOT, text=True)
    assert printed.split() == expected.split()


def test_the_example_of_an_inspected_run() -> None:
    """The lines of the example in docs/library.md that no run changes are those of the command."""
    example = (
        _text("docs/library.md").partition("$ python -m diloco.inspect ")[2].partition("```")[0]
    )
    rendering = _text("diloco/inspection/rendering.py")
    headings = re.findall(r"^(\w[^\n:\d]*)$", example.partition("\n")[2], re.MULTILINE)
    assert headings == ["contributions"]
    assert all(f'"{heading}"' in rendering for heading in headings)
    assert "health: no problems" in example and '"no problems"' in rendering


def test_the_example_of_a_sign_in() -> None:
    line = next(x for x in _text("docs/cli.md").splitlines() if x.startswith("signed in as"))
    assert "; token saved in /" in line
    assert "; token saved in {" in _text("archipelago/write_commands.py")


def test_the_table_of_alerts_is_complete() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", _section("docs/dashboard.md", "## Alerts"), re.MULTILINE)
    documented = {name for row in rows for name in row.lower().split(", ")}
    missing = {title for title in KINDS.values() if title.lower() not in documented}
    assert not missing


def test_labels_of_pages_exist() -> None:
    """A name in italics that begins like a label is a text of the product or of the docs."""
    suffixes = {".py", ".html", ".js", ".json"}
    sources = [
        path.read_text()
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes
    ]
    product = " ".join(" ".join(sources).split())
    for name in ("dashboard", "cli", "credentials", "backends"):
        text = " ".join(CODE_BLOCK.sub("", _text(f"docs/{name}.md")).split())
        for label in re.findall(r"(?<![*\w])\*([A-Z][^*]{1,40})\*(?!\*)", text):
            assert label in product or f"**{label}" in text, f"docs/{name}.md: {label}"


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_options_of_commands_exist(path: Path) -> None:
    """Options in examples of ``python -m diloco.<command>`` are known to that command."""
    settings = {"--" + spec.name.replace("_", "-") for spec in setting_fields()}
    for block in CODE_BLOCK.findall(path.read_text()):
        for module, line in re.findall(
            r"python -m diloco\.(\w+) (.*)$", block.replace("\\\n", ""), re.MULTILINE
        ):
            source = _text(f"diloco/{module}.py")
            known = {*re.findall(r'"(--[\w-]+)"', source), "--help", "--version"}
            used = set(re.findall(r"(?<!\S)--[\w-]+", re.sub(r"\s#.*", "", line)))
            assert used <= known | settings, line


@pytest.mark.parametrize("folder", ["diloco", "runs"])
def test_the_architecture_names_every_package(folder: str) -> None:
    text = _text("docs/architecture.md")
    for child in sorted((ROOT / folder).glob("*/__init__.py")):
        name = child.parent.name
        if name not in {"integrations", "management", "migrations"}:
            assert f"({f'../{folder}/{name}/'})" in text, name


def test_every_page_is_linked_from_the_readme() -> None:
    readme = _text("README.md")
    for path in sorted((ROOT / "docs").glob("*.md")):
        assert f"docs/{path.name}" in readme, path.name


def test_pictures_have_a_title_and_a_dark_palette() -> None:
    for path in sorted((ROOT / "docs" / "images").glob("*.svg")):
        text = path.read_text()
        assert "<title" in text and "prefers-color-scheme: dark" in text, path.name


def test_each_statement_about_another_system_has_a_source() -> None:
    table, sources = (
        [
            [cell.strip() for cell in line.strip("| ").split(" | ")]
            for line in part.splitlines()
            if line.startswith("| ") and not line.startswith("| ---")
        ]
        for part in (
            _text("docs/comparison.md").partition("## When to use which")[0],
            _section("docs/comparison.md", "## Sources"),
        )
    )
    assert [row[0] for row in sources[1:]] == [row[0] for row in table[1:]]
    assert sources[0][-5:] == table[0][-5:]
    for statements, links in zip(table[1:], sources[1:], strict=True):
        for statement, link in zip(statements[2:], links[1:], strict=True):
            assert link.startswith("[") or (statement, link) == ("no", "-"), (statements[0], link)
