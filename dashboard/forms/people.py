"""Signing in, the first administrator, other people, and passwords."""

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

from dashboard.forms.fields import dress
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
        label="Set-up token",
        max_length=200,
        help_text="Printed by the server at its start, and by: "
        ".venv/bin/python manage.py setup_token",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs["class"] = "input"
        self.fields["username"].widget.attrs["autofocus"] = True
        self.fields["username"].help_text = ""
        self.fields["password1"].help_text = "At least 8 characters, and not a common one."
        self.fields["password2"].help_text = ""
        self.fields["password2"].label = "Password again"

    class Meta:
        model = User
        fields = ("username",)

    def clean_token(self) -> str:
        token = str(self.cleaned_data["token"])
        if not setup_token.matches(token):
            raise forms.ValidationError(
                "This is not the set-up token of this server. Copy it from the terminal of "
                "the server, or run: .venv/bin/python manage.py setup_token"
            )
        return token

    def save_if_first(self) -> User | None:
        """The new administrator, or None if somebody was faster. Call inside ``atomic``.

        The row of the admin group is the lock, so that of two people only one becomes the first.
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


class PersonForm(forms.Form):
    """Somebody new. The password is theirs to choose."""

    name = forms.CharField(
        label="Name",
        max_length=150,
        validators=[UnicodeUsernameValidator()],
        help_text="What they sign in with: letters, digits and @ . + - _",
    )
    role = forms.ChoiceField(
        label="Role",
        choices=[(role, f"{role}: {may}") for role, may in users.ROLES.items()],
        widget=forms.RadioSelect,
        initial="viewer",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dress(self)


class OwnPasswordForm(_PasswordChange):
    """The old one is asked for: a screen left open must not become a stolen account."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["old_password"].label = "Password now"
        _dress_passwords(self)


class ChosenPasswordForm(_SetPassword):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _dress_passwords(self)


def _dress_passwords(form: forms.Form) -> None:
    for field in form.fields.values():
        field.widget.attrs["class"] = "input"
    form.fields["new_password1"].label = "New password"
    form.fields["new_password1"].help_text = "At least 8 characters, and not a common one."
    form.fields["new_password2"].label = "New password again"
    form.fields["new_password2"].help_text = ""
