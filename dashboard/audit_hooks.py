"""What the audit log learns from requests: the client's address, sign-ins, denials, and every
action of the administration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.core.cache import cache
from django.db.models.signals import post_save
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse

from dashboard import throttle
from runs import audit

DENIALS_EVERY_S = 60
"""A user who is denied the same path again within this time gets no second entry, so that the log
cannot be flooded."""
_VERBS = {1: "added", 2: "changed", 3: "deleted"}


def middleware(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """Django's form of middleware; after authentication."""

    def handle(request: HttpRequest) -> HttpResponse:
        reset = audit.address.set(throttle.address_of(request))
        try:
            response = get_response(request)
            if response.status_code in (403, 429):
                _denied(request, response.status_code)
            return response
        finally:
            audit.address.reset(reset)

    return handle


def _denied(request: HttpRequest, status: int) -> None:
    user: Any = getattr(request, "user", None)
    name = user.get_username() if user is not None else ""
    path = f"{request.method} {request.path[:150]}"
    if status == 429:
        name, path = name or request.POST.get("username", "")[:150], path
    if cache.add(f"audit:denied:{hash((name, path, audit.address.get()))}", 1, DENIALS_EVERY_S):
        action = "access.denied" if status == 403 else "access.throttled"
        audit.record(action, actor=name, target=path)


@receiver(user_logged_in)
def _signed_in(request: HttpRequest | None, user: Any, **_: Any) -> None:
    audit.record("sign_in.succeeded", actor=user)


@receiver(user_logged_out)
def _signed_out(request: HttpRequest | None, user: Any, **_: Any) -> None:
    if user is not None:
        audit.record("sign_out", actor=user)


@receiver(user_login_failed)
def _failed(credentials: dict[str, Any], **_: Any) -> None:
    # A password typed into the field of the name must not be kept: only names that exist are.
    from django.contrib.auth.models import User

    name = str(credentials.get("username", ""))[:150]
    known = User.objects.filter(username=name).exists() if "\0" not in name else False
    audit.record("sign_in.failed", actor=name if known else "", detail="" if known else "no user")


@receiver(post_save, sender=LogEntry)
def _administration(instance: LogEntry, created: bool, **_: Any) -> None:
    """Everything that the administration logs, and so all its changes and actions."""
    if created:
        audit.record(
            f"admin.{_VERBS.get(instance.action_flag, 'changed')}",
            actor=instance.user,
            target=f"{instance.content_type} {instance.object_repr}",
            detail=instance.get_change_message(),
        )
