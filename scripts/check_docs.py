"""Check that the docs match the code; ``make check`` runs it.

- a relative link in a Markdown file leads to an existing file and heading;
- a file or folder in a code span, such as `runs/tasks.py`, exists;
- every environment variable that the code reads is documented, and the reverse;
- every make target and management command is documented, and every documented target exists.

"Documented" means named in ``README.md``, ``CONTRIBUTING.md`` or ``docs/``. Links to other
sites are not checked.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("archipelago", "diloco", "executors", "runs", "dashboard", "scripts", "manage.py")
IGNORED = {".venv", ".git", "var", "node_modules", "static", "test-artifacts", "build"}
NOT_SETTINGS = {"DJANGO_SETTINGS_MODULE"}

_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_CODE_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"`[^`\n]*`")
_PATH = re.compile(
    r"(?:bench|dashboard|diloco|docs|examples|executors|runs|scripts|templates|tests)"
    r"/[\w./*-]*(?:/|\.\w+)"
)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_READ = re.compile(
    r"""(?:environ(?:\.get\(|\.pop\(|\[)|getenv\(|_flag\(|_list\()\s*["']([A-Z][A-Z0-9_]+)["']"""
)
_OURS = re.compile(r"\bARCHIPELAGO_[A-Z][A-Z0-9_]*\b")
_TARGET = re.compile(r"^([a-z][a-z-]*):.*## ", re.MULTILINE)
_TARGET_USED = re.compile(
    r"`(?:[A-Z]+=\S+ )*make ([a-z][a-z-]*)|^make ([a-z][a-z-]*)", re.MULTILINE
)


def check(root: Path) -> list[str]:
    """The problems in the docs of the repository at ``root``."""
    docs = {path: path.read_text() for path in _markdown(root)}
    documented = "\n".join(text for path, text in docs.items() if _is_documentation(path, root))
    return [
        *_broken_links(docs, root),
        *_missing_paths(docs, root),
        *_settings(root, documented),
        *_targets(root, documented),
        *_commands(root, documented),
    ]


def _markdown(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.md")):
        if not IGNORED & set(path.relative_to(root).parts):
            yield path


def _is_documentation(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return parts[0] == "docs" or parts in {("README.md",), ("CONTRIBUTING.md",)}


def _broken_links(docs: dict[Path, str], root: Path) -> Iterator[str]:
    for path, text in docs.items():
        prose = _CODE_SPAN.sub("", _CODE_BLOCK.sub("", text))
        for target in _LINK.findall(prose):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            linked = (path.parent / name).resolve() if name else path
            where = path.relative_to(root)
            if not linked.exists():
                yield f"{where}: broken link {target}"
            elif anchor and linked.suffix == ".md" and anchor not in _anchors(linked.read_text()):
                yield f"{where}: no heading for link {target}"


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub generates for headings."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_CODE_BLOCK.sub("", text)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        kept = "".join(c for c in plain if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = kept.replace(" ", "-")
        number = 1
        unique = slug
        while unique in anchors:
            unique, number = f"{slug}-{number}", number + 1
        anchors.add(unique)
    return anchors


def _missing_paths(docs: dict[Path, str], root: Path) -> Iterator[str]:
    """Code spans such as `runs/tasks.py` or `diloco/store/` that name no file or folder. The
    changelog and the decision records are not checked: they describe an earlier tree."""
    for path, text in docs.items():
        where = path.relative_to(root)
        if where.name == "CHANGELOG.md" or "adr" in where.parts:
            continue
        for span in _CODE_SPAN.findall(_CODE_BLOCK.sub("", text)):
            named = span.strip("`").partition("::")[0]
            if _PATH.fullmatch(named) and not list(root.glob(named.rstrip("/"))):
                yield f"{where}: {named} does not exist"


def _settings(root: Path, documented: str) -> Iterator[str]:
    read: dict[str, Path] = {}
    for path in _code_files(root):
        text = path.read_text()
        for name in {*_READ.findall(text), *_OURS.findall(text)} - NOT_SETTINGS:
            read.setdefault(name, path)
    for name, path in sorted(read.items()):
        if not re.search(rf"\b{name}\b", documented):
            yield f"{path.relative_to(root)}: the environment variable {name} is not documented"
    for name in sorted(set(_OURS.findall(documented)) - set(read)):
        yield f"docs: {name} is documented, but nothing reads it"


def _code_files(root: Path) -> Iterator[Path]:
    for name in CODE:
        path = root / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.exists()


def _targets(root: Path, documented: str) -> Iterator[str]:
    there = set(_TARGET.findall((root / "Makefile").read_text()))
    used = {first or second for first, second in _TARGET_USED.findall(documented)}
    for name in sorted(there - used - {"help"}):
        yield f"Makefile: the target {name} is not documented"
    for name in sorted(used - there):
        yield f"docs: make {name} is documented, but there is no such target"


def _commands(root: Path, documented: str) -> Iterator[str]:
    for path in sorted(root.glob("*/management/commands/[a-z]*.py")):
        if not re.search(rf"manage\.py {path.stem}\b", documented):
            where = path.relative_to(root)
            yield f"{where}: the command manage.py {path.stem} is not documented"


if __name__ == "__main__":
    problems = check(ROOT)
    print("\n".join(problems) or "docs: links, settings, targets and commands agree")
    sys.exit(bool(problems))
