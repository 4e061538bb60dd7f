"""Forms that are rows of the submit form, such as its pools.

Field names are ``<part>.<index>.<field>``, as in :class:`~runs.exceptions.InvalidRun`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from django import forms


class RowForm(forms.Form):
    """``index`` '': the form is not a row but a separate page."""

    part: ClassVar[str]
    fallback: ClassVar[str]
    """The field with the errors of the whole row."""

    def __init__(
        self,
        data: Any = None,
        *,
        index: int | str,
        initial: dict[str, Any] | None = None,
    ) -> None:
        self.index = index
        prefix = None if index == "" else f"{self.part}.{index}"
        super().__init__(data, initial=initial, prefix=prefix)

    def add_prefix(self, field_name: str) -> str:
        return f"{self.prefix}.{field_name}" if self.prefix else field_name

    def forget_errors(self) -> None:
        """Show the input without errors: the row was posted to change it, not to launch."""
        self._errors = forms.utils.ErrorDict()
        self.cleaned_data = {}

    def place(self, field: str, message: str) -> None:
        """Attach a domain error to its field, or to the row's fallback if it has no such field."""
        self.is_valid()  # creates the error list
        self.add_error(field if field in self.fields else self.fallback, message)

    def named_errors(self) -> Iterator[tuple[str, list[str]]]:
        for name, errors in self.errors.items():
            yield (
                self.add_prefix(self.fallback if name == "__all__" else name),
                [str(e) for e in errors],
            )

    @classmethod
    def posted(cls, data: Any, *, most: int) -> list[int]:
        """Indices of the posted rows, in order. Removed rows leave gaps."""
        row = re.compile(rf"{cls.part}\.(\d{{1,4}})\.\w+")
        indices = {int(match[1]) for name in data if (match := row.fullmatch(name))}
        return sorted(indices)[:most]
