"""Check that a tag, the version of the package, the changelog and the built files agree.

python scripts/check_release.py v0.2.0         tag, version and changelog
python scripts/check_release.py v0.2.0 dist    and the sdist and wheel in dist
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("archipelago", "diloco")


def version(root: Path) -> str:
    """Return ``__version__``, parsed rather than imported."""
    for node in ast.parse((root / "diloco" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise ValueError("diloco/__init__.py: expected __version__, found none")


def problems(root: Path, tag: str) -> Iterator[str]:
    """Yield what differs between the tag, the version and the changelog."""
    expected = f"v{version(root)}"
    if tag != expected:
        yield f"tag: expected {expected}, the version in diloco/__init__.py, found {tag}"
    heading = rf"^## {re.escape(version(root))} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        yield f"CHANGELOG.md: expected a heading '## {version(root)} (YYYY-MM-DD)', found none"


def problems_of_files(root: Path, dist: Path) -> Iterator[str]:
    """Yield what is wrong with the sdist and the wheel in ``dist``."""
    stem = f"archipelago_diloco-{version(root)}"
    expected = {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"}
    found = {path.name for path in dist.iterdir()}
    if found != expected:
        yield f"{dist}: expected {', '.join(sorted(expected))}, found {', '.join(sorted(found))}"
        return
    with zipfile.ZipFile(dist / f"{stem}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    for name in (f"{package}/py.typed" for package in PACKAGES):
        if name not in names:
            yield f"wheel: expected {name}, found none"
    if others := {name.split("/")[0] for name in names} - {*PACKAGES, f"{stem}.dist-info"}:
        yield f"wheel: expected the packages {', '.join(PACKAGES)}, found also {', '.join(others)}"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    found = list(problems(ROOT, arguments[0]))
    if len(arguments) == 2:
        found += problems_of_files(ROOT, Path(arguments[1]))
    print("\n".join(found) or f"release {arguments[0]}: tag, version, changelog and files agree")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
