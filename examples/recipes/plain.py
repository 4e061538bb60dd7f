"""Print a recipe as the script of a single worker, without the lines marked "diloco".

    python examples/recipes/plain.py examples/recipes/trainer_lora.py

A ``with`` statement among these lines takes its indentation with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

MARK = "# diloco"


def marked(source: str) -> list[str]:
    """Return the lines that make a plain script a replica."""
    return [line.strip() for line in source.splitlines() if line.endswith(MARK)]


def plain(source: str) -> str:
    """Return the source without the marked lines."""
    result: list[str] = []
    block: int | None = None
    """Indentation of a removed ``with`` statement whose block is being read."""
    for line in source.splitlines():
        indentation = len(line) - len(line.lstrip())
        if line.strip() and block is not None and indentation <= block:
            block = None
        if line.endswith(MARK):
            if line.lstrip().startswith("with "):
                block = indentation
            continue
        result.append(line[4:] if block is not None and line.strip() else line)
    return "\n".join(result) + "\n"


if __name__ == "__main__":
    print(plain(Path(sys.argv[1]).read_text()), end="")
