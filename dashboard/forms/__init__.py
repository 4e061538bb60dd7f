"""Forms. They parse input and attach errors to fields. The domain validates the values:
:class:`diloco.protocol.settings.GroupSettings` and :mod:`runs.submit`."""

from __future__ import annotations

from dashboard.forms.pools import PoolChoices, PoolForm, initial_of, option_help
from dashboard.forms.run import RunForm, initial_from
from dashboard.forms.users import FirstAdministratorForm, SignInForm

__all__ = [
    "FirstAdministratorForm",
    "PoolChoices",
    "PoolForm",
    "RunForm",
    "SignInForm",
    "initial_from",
    "initial_of",
    "option_help",
]
