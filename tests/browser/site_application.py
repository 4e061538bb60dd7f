"""The application of the web server in browser tests.

It looks for a worker twice a second, and keeps its connections to SQLite: with a new connection
each request reads the schema again.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.sqlite3.base import DatabaseWrapper

from tests.web_application import application

__all__ = ["application"]

from dashboard.live import feed

feed.CHECK_S = 0.4
feed.BLOCK_MS = 500

_idle: list[Any] = []
_connect = DatabaseWrapper.get_new_connection


def _take(self: DatabaseWrapper, parameters: Any) -> Any:
    return _idle.pop() if _idle else _connect(self, parameters)


def _put_back(self: DatabaseWrapper) -> None:
    connection = self.connection
    if connection.in_transaction:
        connection.rollback()
    _idle.append(connection)


DatabaseWrapper.get_new_connection = _take  # type: ignore[method-assign]
DatabaseWrapper._close = _put_back  # type: ignore[method-assign]
