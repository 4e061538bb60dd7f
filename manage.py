#!/usr/bin/env python
"""Django's command-line entry point."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")
    from dashboard.security.private_files import set_umask

    set_umask()
    from django.conf import settings
    from django.core.management import execute_from_command_line

    try:
        settings.DATABASES  # noqa: B018 -- reads the settings, which make the state folder
    except OSError as error:
        sys.exit(
            f"archipelago: the state folder cannot be used: {error.strerror}: {error.filename}"
        )
    try:
        execute_from_command_line(sys.argv)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
