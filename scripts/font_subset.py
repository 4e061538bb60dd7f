"""Make the fonts of ``static/vendor`` from their npm packages: ``font_subset.py NODE_MODULES``.

Run it after ``npm install inter-ui@4.1.1 @fontsource-variable/geist-mono@5.3.0`` and ``pip install
fonttools brotli``; neither is needed otherwise, because the results are committed. It keeps Latin
letters, the signs that pages use, weights from 400 to 600, and the OpenType features of figures.
Other scripts fall back to fonts of the system.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fontTools import subset  # type: ignore[import-not-found]
from fontTools.ttLib import TTFont  # type: ignore[import-not-found]
from fontTools.varLib import instancer  # type: ignore[import-not-found]

VENDOR = Path(__file__).resolve().parent.parent / "static" / "vendor"
FONTS = {
    "inter-4.1.1/inter.woff2": "inter-ui/variable/InterVariable.woff2",
    "geist-mono-5.3.0/geist-mono.woff2": (
        "@fontsource-variable/geist-mono/files/geist-mono-latin-wght-normal.woff2"
    ),
}
LICENCES = {
    "inter-4.1.1/LICENSE": "inter-ui/LICENSE.txt",
    "geist-mono-5.3.0/LICENSE": "@fontsource-variable/geist-mono/LICENSE",
}
AXES = {"wght": (400, 600), "opsz": 14}
"""Axis -> range or fixed value."""
FEATURES = ["calt", "case", "ccmp", "kern", "liga", "locl", "mark", "mkmk", "tnum", "zero"]
CHARACTERS = [
    *range(0x20, 0x7F),
    *range(0xA0, 0x180),
    *map(ord, "‐–—‘’“”„†•…‰′″‹›€₂←↑→↓↔⇧⌘⌥⏎−∞≈≠≤≥√Δμσ✓✗×·"),
]


def make(source: Path, target: Path) -> None:
    """Write a subset of a variable font."""
    font = TTFont(source, recalcTimestamp=False)
    options = subset.Options(layout_features=FEATURES, flavor="woff2", hinting=False)
    options.name_IDs = [0, 1, 2, 13, 14]
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=CHARACTERS)
    subsetter.subset(font)
    axes = {axis.axisTag for axis in font["fvar"].axes}
    font = instancer.instantiateVariableFont(font, {a: v for a, v in AXES.items() if a in axes})
    target.parent.mkdir(exist_ok=True)
    subset.save_font(font, str(target), options)
    print(f"{target.relative_to(VENDOR)}: {target.stat().st_size:,} bytes")


def main() -> None:
    packages = Path(sys.argv[1])
    for target, source in FONTS.items():
        make(packages / source, VENDOR / target)
    for target, source in LICENCES.items():
        shutil.copyfile(packages / source, VENDOR / target)


if __name__ == "__main__":
    main()
