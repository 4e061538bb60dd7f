"""``python -m archipelago``, which is ``archipelago`` where the package is installed."""

import sys

from archipelago.cli import main

sys.exit(main())
