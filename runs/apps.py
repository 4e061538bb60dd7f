from django.apps import AppConfig
from django.core import checks


class RunsConfig(AppConfig):
    name = "runs"
    verbose_name = "Runs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from runs.schema import check_database

        checks.register(check_database, checks.Tags.database)
