"""Sign in, sign out, and the first administrator on a server that has no user yet."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import login, views
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from dashboard.forms import FirstAdministratorForm, SignInForm


@method_decorator(login_not_required, name="dispatch")
class LoginView(views.LoginView):
    template_name = "auth/login.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not User.objects.exists():
            return redirect("setup")
        return super().dispatch(request, *args, **kwargs)


@login_not_required
@never_cache
@require_http_methods(["GET", "POST"])
def setup(request: HttpRequest) -> HttpResponse:
    """Create the first administrator. Once any user exists this leads to the sign-in page."""
    if User.objects.exists():
        return redirect("login")
    form = FirstAdministratorForm(request.POST or None)
    if form.is_valid():
        with transaction.atomic():
            user = form.save_if_first()
        if user is None:
            return redirect("login")
        login(request, user)
        return redirect("runs")
    return render(
        request, "auth/setup.html", {"form": form}, status=200 if not form.errors else 422
    )
