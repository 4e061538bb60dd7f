"""The ``--version`` option of the command lines."""

from __future__ import annotations

import argparse


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the version of the package."""
    import diloco

    parser.add_argument(
        "--version", action="version", version=f"archipelago-diloco {diloco.__version__}"
    )
