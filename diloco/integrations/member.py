"""Shared by the callbacks of all trainers: they join a group, and leave it once."""

from __future__ import annotations

from typing import Self

from diloco.group import Group


class Member:
    """A callback with the :class:`~diloco.group.Group` that it has joined, or had."""

    group: Group | None = None
    _has_joined = False

    def _enter(self, group: Group) -> Group:
        """Keep the group, to be left by :meth:`close`."""
        self.group, self._has_joined = group, True
        return group

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group, because of ``error`` if one is given. Can be called twice."""
        if self.group is not None and self._has_joined:
            self._has_joined = False
            kind = None if error is None else type(error)
            self.group.__exit__(kind, error, None if error is None else error.__traceback__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
