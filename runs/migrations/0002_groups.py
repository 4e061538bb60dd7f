"""The three roles. Everybody in one may look; what an operator may do to a run is decided per run
by :func:`runs.permissions.may_operate`, so no group holds a permission to change anything."""

from django.apps.registry import Apps
from django.contrib.auth.management import create_permissions
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

ROLES = ("viewer", "operator", "admin")


def create_roles(apps: Apps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    # Permissions are made after all migrations; here they are needed now.
    for config in apps.get_app_configs():
        config.models_module = True
        create_permissions(config, apps=apps, verbosity=0, using=schema_editor.connection.alias)
        config.models_module = None
    group = apps.get_model("auth", "Group")
    permission = apps.get_model("auth", "Permission")
    may_view = permission.objects.filter(
        content_type__app_label="runs", codename__startswith="view_"
    )
    for role in ROLES:
        made, _ = group.objects.get_or_create(name=role)
        made.permissions.add(*may_view)


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0001_initial"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]
    operations = [migrations.RunPython(create_roles, migrations.RunPython.noop)]
