"""The part of the submit form that says whose weights a run begins with. It is there only where
somebody chose *Fork* at a run; a form without it begins with weights of its own."""

from __future__ import annotations

from typing import Any

from django import forms

from runs.models import Run
from runs.submit.clone_and_fork import forkable
from runs.submit.run_draft import Fork


class ForkForm(forms.Form):
    fork_run = forms.UUIDField(widget=forms.HiddenInput, required=False)
    fork_round = forms.TypedChoiceField(
        label="Round",
        required=False,
        coerce=int,
        empty_value=None,
        help_text="The newest checkpoints are kept.",
    )
    fork_outer = forms.BooleanField(
        label="Take over the outer optimizer's state",
        required=False,
        help_text="Its momentum. Needs the same fragments.",
    )

    def offer_rounds(self) -> None:
        """Offer the rounds of the run that the form names."""
        field = self.fields["fork_round"]
        assert isinstance(field, forms.ChoiceField)
        rounds = forkable(self.origin) if self.origin else []
        field.choices = [(round, f"Round {round}") for round in rounds]

    @property
    def origin(self) -> Run | None:
        """The run it is forked from."""
        if not hasattr(self, "_origin"):
            given = self["fork_run"].value()
            try:
                pk = self.fields["fork_run"].clean(given)
            except forms.ValidationError:
                pk = None
            self._origin = Run.objects.filter(pk=pk).first() if pk else None
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
