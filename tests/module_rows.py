"""Rows that all tests of a module share, written once.

Most of the time of a short test with a database is spent on writing its rows. A fixture with module
scope that requests ``module_rows`` writes them in a transaction that stays open until the last test
of the module, and each test changes them in a savepoint that is rolled back:

    @pytest.fixture(scope="module")
    def seeded(module_rows):
        with module_rows():
            return seed.run(seed.user("owner", "operator"))

    @pytest.fixture
    def run(db, seeded):
        return copy.deepcopy(seeded)  # a test can change its attributes

Tests with transactions would wait for this one, so a module cannot have both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import pytest

from tests import parallel


class Unblock(Protocol):
    """Allows access to the database inside a ``with`` statement."""

    def __call__(self) -> AbstractContextManager[None]: ...


@contextlib.contextmanager
def open_transaction(items: list[pytest.Item], module: object, blocker: Any) -> Iterator[Unblock]:
    """Open the transaction of ``module``, whose tests are among ``items``; roll it back at the end.

    Raises:
        ValueError: A test of the module uses transactions.
    """
    for item in items:
        if getattr(item, "module", None) is module and parallel.stage(item)[1]:
            raise ValueError(f"module_rows: expected no test with transactions, found {item.name}")
    from django.db import transaction

    with contextlib.ExitStack() as closing:
        with blocker.unblock():
            closing.enter_context(transaction.atomic())
        try:
            yield blocker.unblock
        finally:
            with blocker.unblock():
                transaction.set_rollback(True)
                closing.close()
