"""SQLite: the audit log refuses ``INSERT OR REPLACE`` over an entry as well."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from runs import audit_triggers


def install(apps: Any, editor: Any) -> None:
    audit_triggers.install_replace(editor.connection)


class Migration(migrations.Migration):
    dependencies = [("runs", "0023_pending_attempts")]

    operations = [migrations.RunPython(install, migrations.RunPython.noop)]
