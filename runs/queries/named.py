"""Credentials, webhooks and uploaded archives as documents of runs name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runs.exceptions import InvalidRun
from runs.models import Archive, Credential, ExperimentTracker, Webhook


def credentials() -> Sequence[Credential]:
    """All credentials, by name. Their secrets stay encrypted."""
    return list(Credential.objects.order_by("name"))


def credential_names(ids: Iterable[int | None]) -> dict[int | None, str]:
    """Names by id."""
    known = Credential.objects.filter(pk__in=[pk for pk in ids if pk is not None])
    return {row.pk: row.name for row in known}


def credential_id(wanted: str | int | None, kind: str, field: str) -> int | None:
    """The id of a credential that is given by its name or id. Raises :class:`InvalidRun`."""
    if wanted is None or wanted == "":
        return None
    key = {"pk": wanted} if isinstance(wanted, int) else {"name": wanted}
    of_kind = Credential.objects.filter(kind=kind)
    credential = of_kind.filter(**key).first()
    if credential is None:
        known = ", ".join(of_kind.values_list("name", flat=True))
        raise InvalidRun(
            field, f"expected a credential for {kind} ({known or 'none yet'}), found {wanted!r}"
        )
    return credential.pk


def webhooks(*, enabled: bool = False) -> dict[int, str]:
    """Names of all webhooks by id, or only of those that are enabled."""
    rows = Webhook.objects.filter(enabled=True) if enabled else Webhook.objects.all()
    return dict(rows.values_list("pk", "name"))


def webhook_ids(wanted: Sequence[str | int]) -> tuple[int, ...]:
    """Ids of webhooks that are given by name or id. Raises :class:`InvalidRun`."""
    known = {name: pk for pk, name in webhooks().items()}
    for index, webhook in enumerate(wanted):
        if webhook not in known and webhook not in known.values():
            raise InvalidRun(
                f"notify.{index}",
                f"expected a webhook ({', '.join(known) or 'none yet'}), found {webhook!r}",
            )
    return tuple(known[webhook] if isinstance(webhook, str) else webhook for webhook in wanted)


def trackers() -> dict[int, str]:
    """Names of enabled trackers by id."""
    return dict(ExperimentTracker.objects.filter(enabled=True).values_list("pk", "name"))


def tracker_ids(wanted: Sequence[str]) -> tuple[int, ...]:
    """Ids of trackers that are given by name. Raises :class:`InvalidRun`."""
    known = {name: pk for pk, name in trackers().items()}
    for index, name in enumerate(wanted):
        if name not in known:
            raise InvalidRun(
                f"trackers.{index}",
                f"expected a tracker ({', '.join(known) or 'none yet'}), found {name!r}",
            )
    return tuple(dict.fromkeys(known[name] for name in wanted))


def archive(sha256: str) -> Archive | None:
    """An uploaded archive by its digest."""
    return Archive.objects.filter(pk=sha256).first()
