"""Options and output that commands ``python -m diloco.<name>`` have in common."""

from __future__ import annotations

import argparse
import math
from typing import Any


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the version of the package, and ``--verbose``."""
    import diloco

    parser.add_argument(
        "--version", action="version", version=f"archipelago-diloco {diloco.__version__}"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print the traceback of an error"
    )


def finite_json(value: Any) -> Any:
    """Return a document for ``--json``, with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(name): finite_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
