"""Signing in, and the first administrator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.auth.forms import AuthenticationForm, UserCreationForm
from django.contrib.auth.models import Group, User

if TYPE_CHECKING:
    _UserCreation = UserCreationForm[User]
else:
    _UserCreation = UserCreationForm


class SignInForm(AuthenticationForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs["class"] = "input"


class FirstAdministratorForm(_UserCreation):
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
