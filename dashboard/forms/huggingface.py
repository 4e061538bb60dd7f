"""The Hugging Face part of the submit form: a Transformers language model and its data. Field names
are those of :class:`HuggingFaceWorkload`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django import forms

from diloco.protocol.parsing import parse_json
from diloco.protocol.workload import DATA_FORMATS, SHARDS, STDLIB, HuggingFaceWorkload

HF = HuggingFaceWorkload.kind
OF_HF = (
    "model",
    "revision",
    "config",
    "tokenizer",
    "context",
    "data_format",
    "data_config",
    "data_split",
    "text_column",
    "documents",
    "eval_tokens",
)

_FORMATS = {"auto": "From the file names", "dataset": "Saved data set (directory)"}


class HuggingFaceForm(forms.Form):
    model = forms.CharField(
        label="Model",
        required=False,
        max_length=300,
        help_text="Name on the Hugging Face Hub, e.g. HuggingFaceTB/SmolLM2-135M, or a directory "
        "on every replica.",
    )
    revision = forms.CharField(
        label="Revision", required=False, max_length=100, help_text="Branch, tag or commit."
    )
    config = forms.CharField(
        label="Configuration",
        required=False,
        max_length=100_000,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="A config.json instead of a model. Trains from scratch.",
    )
    tokenizer = forms.CharField(
        label="Tokenizer",
        required=False,
        max_length=300,
        help_text="Name on the hub, a directory, or bytes. Leave empty for the model's own "
        "tokenizer, or bytes with a configuration.",
    )
    context = forms.IntegerField(label="Context", min_value=1, max_value=2**20)
    eval_tokens = forms.IntegerField(
        label="Evaluation", min_value=1, help_text="Held-out tokens per evaluation."
    )
    data_format = forms.ChoiceField(
        label="Format",
        choices=[(name, _FORMATS.get(name, name)) for name in DATA_FORMATS if name != SHARDS],
    )
    data_config = forms.CharField(
        label="Subset", required=False, max_length=100, help_text="Of a data set on the hub."
    )
    data_split = forms.CharField(label="Split", required=False, max_length=100)
    text_column = forms.CharField(
        label="Column", required=False, max_length=100, help_text="Column with the text."
    )
    documents = forms.IntegerField(
        label="Documents", min_value=0, help_text="Use only the first ones. 0 uses all."
    )

    @property
    def of_data(self) -> list[forms.BoundField]:
        """The fields of its data only."""
        return [self[name] for name in OF_HF[OF_HF.index("data_format") : -1]]

    def huggingface(self, data: str, *, is_sharded: bool) -> HuggingFaceWorkload:
        """The workload of a valid form. Raises :class:`SettingsError` with the form's field."""
        values = {name: self.cleaned_data[name] for name in OF_HF}
        texts = {name: v.strip() for name, v in values.items() if isinstance(v, str)}
        coverage = self.cleaned_data["data_coverage"]
        sharded = {"data_format": SHARDS, "data_coverage": coverage} if is_sharded else {}
        return HuggingFaceWorkload(**values | texts | sharded, data=data)


def clean_object(form: forms.Form, cleaned: dict[str, Any], name: str) -> None:
    """Replace the text of a field by the JSON object in it, or add an error."""
    try:
        cleaned[name] = parse_json(cleaned.get(name) or "{}")
    except ValueError as error:
        form.add_error(name, f"expected a JSON object: {error}")


def write_object(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), indent=2) if value else ""


def initial_of_huggingface(workload: Any) -> dict[str, Any]:
    """Initial values of the form; defaults for a workload of another kind."""
    if not isinstance(workload, HuggingFaceWorkload):
        # The class requires a model or a configuration; the form leaves both empty.
        workload = HuggingFaceWorkload(model="none", data=STDLIB)
        return {name: getattr(workload, name) for name in OF_HF} | {"model": "", "config": ""}
    values = {name: getattr(workload, name) for name in OF_HF}
    if workload.data_format == SHARDS:  # the field "data_source" has it
        values["data_format"] = "auto"
    return values | {"config": write_object(workload.config)}
