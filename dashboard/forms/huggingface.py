"""The part of the submit form for a language model of Transformers: which model, and of its data
what the other workloads do not ask. Names are :class:`HuggingFaceWorkload`'s own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django import forms

from diloco.protocol.workload import DATA_FORMATS, STDLIB, HuggingFaceWorkload

HF = HuggingFaceWorkload.kind
OF_HF = (
    "model", "revision", "config", "tokenizer", "context", "data_format", "data_config",
    "data_split", "text_column", "documents", "eval_tokens",
)  # fmt: skip

_FORMATS = {"auto": "By the files' names", "dataset": "A data set's directory"}


class HuggingFaceForm(forms.Form):
    model = forms.CharField(
        label="Model",
        required=False,
        max_length=300,
        help_text="On the hub, such as HuggingFaceTB/SmolLM2-135M, or a directory that every "
        "replica has.",
    )
    revision = forms.CharField(
        label="Revision", required=False, max_length=100, help_text="Branch, tag or commit."
    )
    config = forms.CharField(
        label="Or a configuration",
        required=False,
        max_length=100_000,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text="A config.json, in place of a model: it is trained from scratch.",
    )
    tokenizer = forms.CharField(
        label="Tokenizer",
        required=False,
        max_length=300,
        help_text="On the hub, a directory, or bytes. Empty: the model's own; bytes for a "
        "configuration.",
    )
    context = forms.IntegerField(label="Context", min_value=1, max_value=2**20)
    eval_tokens = forms.IntegerField(
        label="Evaluation", min_value=1, help_text="How much held-out text one evaluation reads."
    )
    data_format = forms.ChoiceField(
        label="Format", choices=[(one, _FORMATS.get(one, one)) for one in DATA_FORMATS]
    )
    data_config = forms.CharField(
        label="Subset", required=False, max_length=100, help_text="Of a data set on the hub."
    )
    data_split = forms.CharField(label="Split", required=False, max_length=100)
    text_column = forms.CharField(
        label="Column", required=False, max_length=100, help_text="Where a row has its text."
    )
    documents = forms.IntegerField(
        label="Documents", min_value=0, help_text="Only so many from the start; 0: all."
    )

    @property
    def of_data(self) -> list[forms.BoundField]:
        """What is asked of its data alone."""
        return [self[name] for name in OF_HF[OF_HF.index("data_format") : -1]]

    def huggingface(self, data: str) -> HuggingFaceWorkload:
        """Of a form that is valid. :class:`SettingsError` with the form's field."""
        values = {name: self.cleaned_data[name] for name in OF_HF}
        texts = {name: v.strip() for name, v in values.items() if isinstance(v, str)}
        return HuggingFaceWorkload(**values | texts, data=data)


def parse_object(text: str) -> Any:
    """JSON as it was typed. Raises ``ValueError``."""
    try:
        return json.loads(text or "{}")
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_object(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), indent=2) if value else ""


def initial_of_huggingface(workload: Any) -> dict[str, Any]:
    """Its fields as the form shows them; of another kind, what they are without."""
    if not isinstance(workload, HuggingFaceWorkload):
        # Neither model nor configuration: the one thing somebody has to say.
        workload = HuggingFaceWorkload(model="none", data=STDLIB)
        return {name: getattr(workload, name) for name in OF_HF} | {"model": "", "config": ""}
    return {name: getattr(workload, name) for name in OF_HF} | {
        "config": write_object(workload.config)
    }
