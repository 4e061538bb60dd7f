"""Entry point of ``python -m archipelago``; the same as the installed ``archipelago`` command."""

import sys

from archipelago.cli import main

sys.exit(main())
