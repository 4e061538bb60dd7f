"""A user's own password: change it, or set it with a link from an administrator."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash, views
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse_lazy
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from dashboard.forms.users import ChosenPasswordForm, OwnPasswordForm
from dashboard.security import throttle
from runs import audit
from runs.actions import users


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def password(request: HttpRequest) -> HttpResponse:
    """Change the password. This session continues; all other sessions of the user end, because
    they hold a hash of the old password."""
    assert isinstance(request.user, User)
    address = throttle.address_of(request)
    name = request.user.get_username()
    if request.method != "POST":
        return _page(request, OwnPasswordForm(request.user))
    if throttle.refused(name, address):
        return _page(request, OwnPasswordForm(request.user), status=429)
    form = OwnPasswordForm(request.user, request.POST)
    if not form.is_valid():
        if "old_password" not in form.errors:
            throttle.retract(name, address)
        return _page(request, form, status=422)
    with transaction.atomic():
        form.save()
        audit.record("user.password_changed", actor=request.user, target=f"user {name}")
    throttle.succeeded(name, address)
    update_session_auth_hash(request, request.user)
    messages.success(request, "Your password was changed. You are signed out everywhere else.")
    return redirect("password")


def _page(request: HttpRequest, form: OwnPasswordForm, *, status: int = 200) -> HttpResponse:
    context = {"form": form, "tried_too_often": status == 429}
    return render(request, "account/password.html", context, status=status)


@method_decorator(login_not_required, name="dispatch")
class ChoosePasswordView(views.PasswordResetConfirmView):
    """The page of a password link. The token moves into the session, out of the Referer header."""

    template_name = "account/choose_password.html"
    form_class = ChosenPasswordForm
    token_generator = users.links
    success_url = reverse_lazy("login")
    reset_url_token = "chosen"  # noqa: S105  replaces the token in the URL

    def get_user(self, uidb64: str) -> Any:
        user = super().get_user(uidb64)
        return user if user is not None and user.is_active else None

    def form_valid(self, form: Any) -> HttpResponse:
        with transaction.atomic():
            response = super().form_valid(form)
            audit.record(
                "user.password_changed",
                actor=form.user,
                target=f"user {form.user}",
                detail="with a link from an administrator",
            )
        messages.success(self.request, "Your password is set. Sign in with it.")
        return response
