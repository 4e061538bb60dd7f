"""What is trained: the built-in byte-level GPT, a model of Transformers, or one's own function.

A zip that was uploaded is kept by its digest as soon as it was found sound, so that a form that
comes back for another reason need not be given it again.
"""

from __future__ import annotations

import hashlib
import zipfile
from io import BytesIO
from typing import Any

from django import forms

from dashboard.forms.huggingface import (
    HF,
    OF_HF,
    HuggingFaceForm,
    initial_of_huggingface,
    parse_object,
    write_object,
)
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import (
    GPT_SIZES,
    STDLIB,
    ByteGPTWorkload,
    CustomWorkload,
    HuggingFaceWorkload,
)
from runs.exceptions import InvalidRun
from runs.models import Archive
from runs.submit.run_draft import Workload
from runs.submit.uploads import ARCHIVE_BYTES, check_archive, kept_archive, store_archive

GPT, CUSTOM = ByteGPTWorkload.kind, CustomWorkload.kind
_DATA = ("data_source", "data")
FIELDS = {
    GPT: ("size", "eval_bytes", *_DATA),
    HF: (*OF_HF, *_DATA),
    CUSTOM: ("function", "arguments", "archive", "archive_sha256", "requirements"),
}
"""By kind: the fields that matter."""

LINES = {"rows": 3}


class WorkloadForm(HuggingFaceForm):
    workload = forms.ChoiceField(
        label="What is trained",
        choices=[(GPT, "Byte-level GPT"), (HF, "Hugging Face"), (CUSTOM, "My own code")],
        widget=forms.RadioSelect,
        required=False,
        initial=GPT,
    )
    size = forms.ChoiceField(
        label="Model", widget=forms.RadioSelect, choices=[(name, name) for name in GPT_SIZES]
    )
    data_source = forms.ChoiceField(
        label="Data",
        choices=[("stdlib", "Python standard library"), ("uri", "My own text")],
        widget=forms.RadioSelect,
    )
    data = forms.CharField(  # type: ignore[assignment]
        label="Data URI",
        required=False,
        max_length=500,
        help_text="Text files: a file, folder or glob that fsspec opens, such as "
        "file:///data/books or s3://bucket/text/*.txt. For a Hugging Face model also JSON, CSV or "
        "Parquet, or a data set on the hub.",
    )
    eval_bytes = forms.IntegerField(
        label="Evaluation text",
        min_value=1,
        help_text="How much held-out text one evaluation reads.",
    )
    function = forms.CharField(
        label="Function",
        required=False,
        max_length=200,
        help_text="module:function, which builds model, optimizer and data. It is called with "
        "seed, replica, device, total_steps, settings and arguments.",
    )
    archive = forms.FileField(
        label="Code",
        required=False,
        allow_empty_file=True,
        widget=forms.FileInput(attrs={"accept": ".zip,application/zip"}),
        help_text=f"A zip of at most {ARCHIVE_BYTES / 1e6:g} MB with the module at its top. Empty: "
        "the image has it.",
    )
    archive_sha256 = forms.CharField(widget=forms.HiddenInput, required=False, max_length=64)
    arguments = forms.CharField(
        label="Arguments",
        required=False,
        max_length=100_000,
        widget=forms.Textarea(attrs=LINES),
        help_text="A JSON object, handed to the function as it is.",
    )
    requirements = forms.CharField(
        label="Requirements",
        required=False,
        max_length=20_000,
        widget=forms.Textarea(attrs=LINES),
        help_text="pip requirements, one a line; what the image lacks is installed.",
    )

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        cleaned["workload"] = cleaned.get("workload") or GPT
        kind = cleaned["workload"]
        # What was typed for another kind does not matter, and nobody could see its errors.
        for name in {name for names in FIELDS.values() for name in names} - set(FIELDS[kind]):
            self.errors.pop(name, None)
        if kind == CUSTOM:
            self._clean_custom(cleaned)
        elif cleaned.get("data_source") == "uri" and not cleaned.get("data", "").strip():
            self.add_error("data", "expected a URI of text files, found none")
        if kind == HF:
            self._clean_object(cleaned, "config")
            model, config = cleaned.get("model", "").strip(), cleaned.get("config")
            if "config" not in self.errors and bool(model) == bool(config):
                found = "both" if model else "neither"
                self.add_error(
                    "model", f"expected either a model or a configuration, found {found}"
                )
        return cleaned

    def _clean_object(self, cleaned: dict[str, Any], name: str) -> None:
        try:
            cleaned[name] = parse_object(cleaned.get(name, ""))
        except ValueError as error:
            self.add_error(name, f"expected a JSON object: {error}")

    def _clean_custom(self, cleaned: dict[str, Any]) -> None:
        if not cleaned.get("function", "").strip():
            self.add_error("function", "expected module:function, found none")
        self._clean_object(cleaned, "arguments")
        try:
            self.kept = self._archive(cleaned)
        except InvalidRun as error:
            self.add_error("archive", error.message)

    kept: Archive | None = None
    """The archive that was uploaded, now or with an earlier answer of this form."""

    def _archive(self, cleaned: dict[str, Any]) -> Archive | None:
        upload = cleaned.get("archive")
        if upload:
            if upload.size > ARCHIVE_BYTES:  # before it is all in memory
                limit, found = ARCHIVE_BYTES / 1e6, upload.size / 1e6
                raise InvalidRun("archive", f"expected at most {limit:g} MB, found {found:.1f} MB")
            data = upload.read()
            check_archive(data)
            return store_archive(data)
        digest = cleaned.get("archive_sha256")
        if not digest:
            return None
        kept = kept_archive(digest)
        if kept is None:
            raise InvalidRun("archive", "expected the zip, found that it is gone: choose it again")
        return kept

    def chosen(self) -> tuple[Workload, bytes]:
        """The workload and its archive. Raises :class:`SettingsError` with the form's field."""
        values = self.cleaned_data
        if values["workload"] != CUSTOM:
            data = STDLIB if values["data_source"] == "stdlib" else values["data"].strip()
            if values["workload"] == HF:
                return self.huggingface(data), b""
            size, eval_bytes = values["size"], values["eval_bytes"]
            return ByteGPTWorkload(size=size, data=data, eval_bytes=eval_bytes), b""
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
    def kind(self) -> str:
        """The one that is chosen; the built-in one where nothing that we know was sent."""
        chosen = self["workload"].value()
        return str(chosen) if chosen in FIELDS else GPT

    @property
    def kept_sha256(self) -> str:
        return self.kept.sha256 if self.kept else self["archive_sha256"].value() or ""

    @property
    def archive_note(self) -> str:
        """What of an upload is kept, for the page; of a clone's too, which nobody has sent yet."""
        if self.kept is None and not self.is_bound and self.kept_sha256:
            self.kept = Archive.objects.filter(pk=self.kept_sha256).first()
        if self.kept is None:
            return ""
        with zipfile.ZipFile(BytesIO(bytes(self.kept.data))) as archive:
            files = sum(not name.endswith("/") for name in archive.namelist())
        return f"{files} file{'' if files == 1 else 's'}, sha256 {self.kept.sha256[:12]}…"


def check_module(code: bytes, function: str) -> None:
    """The function's module has to be at the top of the zip: nothing else would bring it."""
    top = function.partition(":")[0].partition(".")[0]
    with zipfile.ZipFile(BytesIO(code)) as archive:
        names = archive.namelist()
    if not any(name == f"{top}.py" or name.startswith(f"{top}/") for name in names):
        found = ", ".join(sorted({name.partition("/")[0] for name in names})[:5])
        raise SettingsError(
            "function", f"expected {top}.py or {top}/ at the top of the zip, found {found}"
        )


def initial_of_workload(workload: Workload) -> dict[str, Any]:
    """A workload as the form shows it, and the other kinds as they are without."""
    gpt = workload if isinstance(workload, ByteGPTWorkload) else ByteGPTWorkload()
    data = workload.data if isinstance(workload, HuggingFaceWorkload) else gpt.data
    shown: dict[str, Any] = {
        "workload": workload.kind,
        "size": gpt.size,
        "data_source": "stdlib" if data == STDLIB else "uri",
        "data": "" if data == STDLIB else data,
        "eval_bytes": gpt.eval_bytes,
        **initial_of_huggingface(workload),
    }
    if isinstance(workload, CustomWorkload):
        shown |= {
            "function": workload.function,
            "arguments": write_object(workload.arguments),
            "archive_sha256": workload.archive,
            "requirements": "\n".join(workload.requirements),
        }
    return shown
