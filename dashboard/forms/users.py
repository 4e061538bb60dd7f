"""Forms for signing in, creating the first administrator, adding users, and passwords."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib.auth.forms import (
    AuthenticationForm,
    PasswordChangeForm,
    SetPasswordForm,
    UserCreationForm,
)
from django.contrib.auth.models import Group, User
from django.contrib.auth.validators import UnicodeUsernameValidator

from dashboard.forms.fields import StyledForm
from dashboard.security import setup_token
from runs.actions import users

if TYPE_CHECKING:
    _UserCreation = UserCreationForm[User]
    _PasswordChange = PasswordChangeForm
    _SetPassword = SetPasswordForm[User]
else:
    _UserCreation = UserCreationForm
    _PasswordChange = PasswordChangeForm
    _SetPassword = SetPasswordForm


class SignInForm(AuthenticationForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs["class"] = "input"


class FirstAdministratorForm(_UserCreation):
    token = forms.CharField(
        label="Setup token",
        max_length=200,
        help_text="Printed by the server when it starts, and by "
        ".venv/bin/python manage.py setup_token",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs["class"] = "input"
        self.fields["username"].widget.attrs.pop("autofocus", None)
        self.fields["username"].help_text = ""
        self.fields["password1"].help_text = "At least 8 characters, and not a common password."
        self.fields["password2"].help_text = ""
        self.fields["password2"].label = "Repeat password"

    class Meta:
        model = User
        fields = ("username",)

    def set_focus(self) -> None:
        """Focus the first field, in the order of the page, that has an error or is empty.

        Browsers get no passwords back, so both must be entered again after any error.
        """
        for name in ("token", "username", "password1"):
            if name == "password1" or self[name].errors or not self[name].value():
                self.fields[name].widget.attrs["autofocus"] = True
                return

    def clean_token(self) -> str:
        token = str(self.cleaned_data["token"])
        if not setup_token.matches(token):
            raise forms.ValidationError(
                "Wrong setup token. Copy it from the server's terminal, or run "
                ".venv/bin/python manage.py setup_token"
            )
        return token

    def save_if_first(self) -> User | None:
        """The new administrator, or None if a user exists already. Call inside ``atomic``.

        The row of the admin group is the lock: of two concurrent requests only one succeeds.
        """
        group, _ = Group.objects.get_or_create(name="admin")
        Group.objects.select_for_update().get(pk=group.pk)
        if User.objects.exists():
            return None
        user = self.save(commit=False)
        user.is_staff = user.is_superuser = True
        user.save()
        user.groups.add(group)
        return user


class PersonForm(StyledForm):
    """A new user, who chooses the password with a link."""

    name = forms.CharField(
        label="Name",
        max_length=150,
        validators=[UnicodeUsernameValidator()],
        help_text="Name to sign in with: letters, digits and @ . + - _",
    )
    role = forms.ChoiceField(
        label="Role",
        choices=[(role, f"{role}: {may}") for role, may in users.ROLES.items()],
        widget=forms.RadioSelect,
        initial="viewer",
    )


class OwnPasswordForm(_PasswordChange):
    """Change the own password. The old password is required, so that an unlocked screen is not
    enough to take over the account."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["old_password"].label = "Current password"
        wrong = "This is not your current password. Enter it again."
        self.error_messages = {**self.error_messages, "password_incorrect": wrong}
        _style_password_inputs(self)


class ChosenPasswordForm(_SetPassword):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _style_password_inputs(self)


def _style_password_inputs(form: forms.Form) -> None:
    for field in form.fields.values():
        field.widget.attrs["class"] = "input"
    form.fields["new_password1"].label = "New password"
    form.fields["new_password1"].help_text = "At least 8 characters, and not a common password."
    form.fields["new_password2"].label = "Repeat new password"
    form.fields["new_password2"].help_text = ""
