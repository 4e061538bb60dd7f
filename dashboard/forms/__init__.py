"""Forms. They parse and point at the wrong field; what is valid is decided where it is used:
:class:`diloco.protocol.settings.GroupSettings` and :mod:`runs.actions.replicas_and_pools`."""

from __future__ import annotations

from dashboard.forms.people import FirstAdministratorForm, SignInForm
from dashboard.forms.pools import PoolChoices, PoolForm, initial_of
from dashboard.forms.run import RunForm, initial_from

__all__ = [
    "FirstAdministratorForm",
    "PoolChoices",
    "PoolForm",
    "RunForm",
    "SignInForm",
    "initial_from",
    "initial_of",
]
