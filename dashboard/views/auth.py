"""Sign in, sign out, and creating the first administrator on a server without users.

The admin site uses this sign-in page too, so that password attempts are counted in one place
(:mod:`dashboard.security.throttle`).
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth import login, views
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from dashboard.forms import FirstAdministratorForm, SignInForm
from dashboard.security import setup_token, throttle
from runs import audit


@method_decorator(login_not_required, name="dispatch")
class LoginView(views.LoginView):
    template_name = "auth/login.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not User.objects.exists():
            return redirect("setup")
        return super().dispatch(request, *args, **kwargs)

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Reject the attempt without checking the password after too many failures."""
        if throttle.refused(*self._who()):
            context = self.get_context_data(form=SignInForm(request), tried_too_often=True)
            return self.render_to_response(context, status=429)
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        throttle.succeeded(*self._who())
        return super().form_valid(form)

    def _who(self) -> tuple[str, str]:
        return self.request.POST.get("username", ""), throttle.address_of(self.request)


@login_not_required
def admin_login(request: HttpRequest) -> HttpResponse:
    """Redirect target of the admin site for visitors who are not signed in."""
    if request.user.is_authenticated:
        raise PermissionDenied("Only administrators can open the admin site.")
    next_url = request.GET.get("next") or reverse("admin:index")
    return redirect(f"{reverse('login')}?{urlencode({'next': next_url})}")


@login_not_required
@never_cache
@require_http_methods(["GET", "POST"])
def setup(request: HttpRequest) -> HttpResponse:
    """Create the first administrator. Redirects to the sign-in page once a user exists."""
    if User.objects.exists():
        return redirect("login")
    setup_token.setup_token()  # the page shows the path of the token file, so create the file
    initial = {"token": request.GET.get("token", "")}
    form = FirstAdministratorForm(request.POST or None, initial=initial)
    if form.is_valid():
        with transaction.atomic():
            user = form.save_if_first()
            if user is not None:
                audit.record("user.first_administrator", actor=user, target=f"user {user}")
        if user is None:
            return redirect("login")
        setup_token.forget()
        login(request, user)
        return redirect("runs")
    form.set_focus()
    return render(
        request, "auth/setup.html", {"form": form}, status=200 if not form.errors else 422
    )
