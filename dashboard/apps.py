from django.apps import AppConfig


class DashboardConfig(AppConfig):
    name = "dashboard"
    verbose_name = "Dashboard"

    def ready(self) -> None:
        from dashboard import checks  # noqa: F401 -- registers them
        from dashboard.security import audit_hooks  # noqa: F401 -- registers them
