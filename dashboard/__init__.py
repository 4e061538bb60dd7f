"""The Django project and the web interface."""

from dashboard.celery import app as celery_app

__all__ = ["celery_app"]
