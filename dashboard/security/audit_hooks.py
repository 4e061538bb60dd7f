"""Audit entries for requests: sign-ins, denied requests, and all actions in the admin site, each
with the client's address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.contrib.admin.models import LogEntry
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.core.cache import cache
from django.db.models.signals import post_save
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware

from dashboard.security import throttle
from runs import audit

DENIALS_EVERY_S = 60
"""A user who is denied the same path again within this time gets no second entry, so that requests
cannot flood the log."""
DENIED = {403: "access.denied", 429: "access.throttled"}
_VERBS = {1: "added", 2: "changed", 3: "deleted"}


@sync_and_async_middleware
def middleware(get_response: Callable[[HttpRequest], Any]) -> Any:
    """Middleware for after authentication. Sync and async, so that it adds no switch of threads."""
    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponse:
            reset = audit.address.set(throttle.address_of(request))
            try:
                response: HttpResponse = await get_response(request)
                if response.status_code in DENIED:
                    await sync_to_async(_denied)(request, response.status_code)
                return response
            finally:
                audit.address.reset(reset)

        return handle_async

    def handle(request: HttpRequest) -> HttpResponse:
        reset = audit.address.set(throttle.address_of(request))
        try:
            response: HttpResponse = get_response(request)
            if response.status_code in DENIED:
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
        name = name or _known(request.POST.get("username", ""))
    if cache.add(f"audit:denied:{hash((name, path, audit.address.get()))}", 1, DENIALS_EVERY_S):
        audit.record(DENIED[status], actor=name, target=path)


@receiver(user_logged_in)
def _signed_in(request: HttpRequest | None, user: Any, **_: Any) -> None:
    audit.record("sign_in.succeeded", actor=user)


@receiver(user_logged_out)
def _signed_out(request: HttpRequest | None, user: Any, **_: Any) -> None:
    if user is not None:
        audit.record("sign_out", actor=user)


@receiver(user_login_failed)
def _failed(credentials: dict[str, Any], **_: Any) -> None:
    name = _known(str(credentials.get("username", "")))
    audit.record("sign_in.failed", actor=name, detail="" if name else "no such user")


def _known(name: str) -> str:
    """The name if such a user exists, otherwise '': the text can be a mistyped password."""
    from django.contrib.auth.models import User

    if "\0" in name:
        return ""
    user = User.objects.filter(username=name[:150]).first()
    return user.get_username() if user else ""


@receiver(post_save, sender=LogEntry)
def _administration(instance: LogEntry, created: bool, **_: Any) -> None:
    """Copy the log of the admin site, which has all its changes and actions."""
    if created:
        audit.record(
            f"admin.{_VERBS.get(instance.action_flag, 'changed')}",
            actor=instance.user,
            target=f"{instance.content_type} {instance.object_repr}",
            detail=instance.get_change_message(),
        )
