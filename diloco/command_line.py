"""Options that all commands ``python -m diloco.<name>`` have."""

from __future__ import annotations

import argparse


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the version of the package, and ``--verbose``."""
    import diloco

    parser.add_argument(
        "--version", action="version", version=f"archipelago-diloco {diloco.__version__}"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print the traceback of an error"
    )
