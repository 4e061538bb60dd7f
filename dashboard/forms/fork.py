"""The fork part of the submit form: the run and the checkpoint to start from. It is only shown for
forks; without it a run starts from new weights."""

from __future__ import annotations

from typing import Any

from django import forms

from runs.models import Run
from runs.queries import run_page
from runs.submit.clone_and_fork import forkable
from runs.submit.run_draft import Fork


class ForkForm(forms.Form):
    fork_run = forms.UUIDField(widget=forms.HiddenInput, required=False)
    fork_round = forms.TypedChoiceField(
        label="Round",
        required=False,
        coerce=int,
        empty_value=None,
        help_text="Older checkpoints are deleted.",
    )
    fork_outer = forms.BooleanField(
        label="Restore the outer optimizer",
        required=False,
        help_text="Keeps its momentum. The number of fragments must be the same.",
    )

    def offer_rounds(self) -> None:
        """Offer the checkpoints of the run that the form refers to."""
        field = self.fields["fork_round"]
        assert isinstance(field, forms.ChoiceField)
        rounds = forkable(self.origin) if self.origin else []
        field.choices = [(round, f"Round {round}") for round in rounds]

    @property
    def origin(self) -> Run | None:
        """The run to fork."""
        if not hasattr(self, "_origin"):
            value = self["fork_run"].value()
            try:
                pk = self.fields["fork_run"].clean(value)
            except forms.ValidationError:
                pk = None
            self._origin = run_page.by_id(pk)
        return self._origin

    def fork(self) -> Fork | None:
        values = self.cleaned_data
        if not values.get("fork_run"):
            return None
        return Fork(
            run=values["fork_run"],
            round=-1 if values["fork_round"] is None else values["fork_round"],
            outer=values["fork_outer"],
        )


def initial_of_fork(fork: Fork | None) -> dict[str, Any]:
    if fork is None:
        return {}
    return {"fork_run": str(fork.run), "fork_round": fork.round, "fork_outer": fork.outer}
