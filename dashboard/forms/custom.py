"""The custom part of the submit form: a function of the user, and its code.

An uploaded zip is stored by its digest once it is valid. If the form is shown again because of
another error, the file need not be chosen again.
"""

from __future__ import annotations

import hashlib
import zipfile
from io import BytesIO
from typing import Any

from django import forms

from dashboard.forms.huggingface import clean_object, write_object
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import CustomWorkload
from runs.exceptions import InvalidRun
from runs.models import Archive
from runs.queries import named
from runs.submit.uploads import ARCHIVE_BYTES, check_archive, kept_archive, store_archive

CUSTOM = CustomWorkload.kind
OF_CUSTOM = ("function", "arguments", "archive", "archive_sha256", "requirements")

LINES = {"rows": 3}


class CustomForm(forms.Form):
    function = forms.CharField(
        label="Function",
        required=False,
        max_length=200,
        help_text="module:function that builds model, optimizer and data. Its arguments are seed, "
        "replica, device, total_steps, settings and arguments.",
    )
    archive = forms.FileField(
        label="Code",
        required=False,
        allow_empty_file=True,
        widget=forms.FileInput(attrs={"accept": ".zip,application/zip"}),
        help_text=f"A zip of at most {ARCHIVE_BYTES / 1e6:g} MB with the module at the top level. "
        "Leave empty if the image has the code.",
    )
    archive_sha256 = forms.CharField(widget=forms.HiddenInput, required=False, max_length=64)
    arguments = forms.CharField(
        label="Arguments",
        required=False,
        max_length=100_000,
        widget=forms.Textarea(attrs=LINES),
        help_text="A JSON object that is passed to the function.",
    )
    requirements = forms.CharField(
        label="Requirements",
        required=False,
        max_length=20_000,
        widget=forms.Textarea(attrs=LINES),
        help_text="pip requirements, one per line, that are installed if the image lacks them.",
    )

    def clean_custom(self, cleaned: dict[str, Any]) -> None:
        if not cleaned.get("function", "").strip():
            self.add_error("function", "Enter a function as module:function.")
        clean_object(self, cleaned, "arguments")
        try:
            self.kept = self._archive(cleaned)
        except InvalidRun as error:
            self.add_error("archive", error.message)

    kept: Archive | None = None
    """The uploaded archive, from this request or from an earlier one of the same form."""

    def _archive(self, cleaned: dict[str, Any]) -> Archive | None:
        upload = cleaned.get("archive")
        if upload:
            if upload.size > ARCHIVE_BYTES:  # before reading it into memory
                limit, size_mb = ARCHIVE_BYTES / 1e6, upload.size / 1e6
                raise InvalidRun(
                    "archive", f"expected at most {limit:g} MB, found {size_mb:.1f} MB"
                )
            data = upload.read()
            check_archive(data)
            return store_archive(data)
        digest = cleaned.get("archive_sha256")
        if not digest:
            return None
        stored = kept_archive(digest)
        if stored is None:
            raise InvalidRun("archive", "The upload has expired. Choose the file again.")
        return stored

    def custom(self) -> tuple[CustomWorkload, bytes]:
        """The workload of a valid form, and its archive. Raises :class:`SettingsError` with the
        form's field."""
        values = self.cleaned_data
        code = bytes(self.kept.data) if self.kept else b""
        custom = CustomWorkload(
            function=values["function"].strip(),
            arguments=values["arguments"],
            archive=hashlib.sha256(code).hexdigest() if code else "",
            requirements=tuple(
                line.strip() for line in values["requirements"].splitlines() if line.strip()
            ),
        )
        if code and not custom.requirements:
            check_module(code, custom.function)
        return custom, code

    @property
    def kept_sha256(self) -> str:
        return self.kept.sha256 if self.kept else self["archive_sha256"].value() or ""

    @property
    def archive_note(self) -> str:
        """Description of the stored upload, also of a clone's."""
        if self.kept is None and not self.is_bound and self.kept_sha256:
            self.kept = named.archive(self.kept_sha256)
        if self.kept is None:
            return ""
        with zipfile.ZipFile(BytesIO(bytes(self.kept.data))) as archive:
            files = sum(not name.endswith("/") for name in archive.namelist())
        return f"{files} file{'' if files == 1 else 's'}, sha256 {self.kept.sha256[:12]}…"


def check_module(code: bytes, function: str) -> None:
    """Raise unless the function's module is at the top level of the zip."""
    top = function.partition(":")[0].partition(".")[0]
    with zipfile.ZipFile(BytesIO(code)) as archive:
        names = archive.namelist()
    if not any(name == f"{top}.py" or name.startswith(f"{top}/") for name in names):
        listing = ", ".join(sorted({name.partition("/")[0] for name in names})[:5])
        raise SettingsError(
            "function", f"expected {top}.py or {top}/ at the top level of the zip, found {listing}"
        )


def initial_of_custom(workload: Any) -> dict[str, Any]:
    """Initial values of the form; none for a workload of another kind."""
    if not isinstance(workload, CustomWorkload):
        return {}
    return {
        "function": workload.function,
        "arguments": write_object(workload.arguments),
        "archive_sha256": workload.archive,
        "requirements": "\n".join(workload.requirements),
    }
