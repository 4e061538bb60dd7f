"""Saves a row that another request may change at the same time."""

from __future__ import annotations

from django.db import DatabaseError, IntegrityError, models, transaction


class AlreadyUsed(Exception):
    """A value that must be unique is used by another row."""


class DeletedMeanwhile(Exception):
    """The row was deleted after it was read."""


def save(row: models.Model) -> None:
    """Insert a new row, or update an existing one, which is never created again.

    Raises :class:`AlreadyUsed` or :class:`DeletedMeanwhile`.
    """
    try:
        with transaction.atomic():
            row.save(force_update=row.pk is not None)
    except IntegrityError:
        raise AlreadyUsed from None
    except DatabaseError:
        if row.pk is None or type(row)._default_manager.filter(pk=row.pk).exists():
            raise
        raise DeletedMeanwhile from None
