"""The audit log: complete, append-only, and without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client

from runs import audit, audit_triggers, redaction
from runs.actions import api_tokens, users
from runs.models import AuditEntry, Credential
from tests.browser import seed

pytestmark = pytest.mark.django_db

CHANGES = (
    "UPDATE runs_auditentry SET actor = 'eve'",
    "DELETE FROM runs_auditentry",
)


def three() -> list[AuditEntry]:
    return [audit.record("test.action", actor="ada", target=f"thing {n}") for n in range(3)]


def actions(**wanted: Any) -> list[str]:
    result = AuditEntry.objects.filter(**wanted).order_by("id")
    return list(result.values_list("action", flat=True))


@pytest.mark.parametrize("statement", CHANGES)
def test_the_database_refuses_changes(statement: str) -> None:
    three()
    audit_triggers.install(connection)
    with (
        pytest.raises(DatabaseError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
    audit.record("test.action", actor="ada")
    assert audit.verify()[2] is None
    audit_triggers.remove(connection)


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL has no REPLACE")
@pytest.mark.parametrize("same", ["id", "hash"])
def test_an_entry_cannot_be_replaced(same: str) -> None:
    entry = three()[1]
    audit_triggers.install(connection)
    values = {"id": entry.pk, "hash": entry.hash} if same == "id" else {"hash": entry.hash}
    columns = {
        **values,
        "at": entry.at,
        "actor": "eve",
        "previous_hash": entry.previous_hash,
        "address": "",
        "action": "nothing",
        "target": "",
        "detail": "",
    }
    columns.setdefault("hash", "f" * 64)
    names, marks = ", ".join(columns), ", ".join("%s" for _ in columns)
    with (
        pytest.raises(DatabaseError, match="append-only"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(
            f"INSERT OR REPLACE INTO runs_auditentry ({names}) VALUES ({marks})",
            list(columns.values()),
        )
    audit.record("test.action", actor="ada")
    assert audit.verify() == (4, AuditEntry.objects.latest("id").hash, None)
    audit_triggers.remove(connection)


def test_the_migration_installs_the_triggers() -> None:
    from importlib import import_module

    migration = import_module("runs.migrations.0001_squashed_0025_waits_and_earlier_costs")
    steps = [o.code for o in migration.Migration.operations if hasattr(o, "code")]
    assert migration.install_audit_triggers in steps


def test_a_changed_entry_is_found() -> None:
    entries = three()
    assert audit.verify() == (3, entries[2].hash, None)
    AuditEntry.objects.filter(pk=entries[1].pk).update(actor="eve")
    with pytest.raises(CommandError, match=f"entry {entries[1].pk}: the entry was changed"):
        call_command("verify_audit_log")


def test_a_missing_entry_is_found() -> None:
    entries = three()
    AuditEntry.objects.filter(pk=entries[1].pk).delete()
    broken = audit.verify()[2]
    assert broken is not None
    assert broken.entry == entries[2].pk


def test_truncated_or_rewritten_log_lacks_the_recorded_head(capsys: Any) -> None:
    head = three()[2].hash
    call_command("verify_audit_log", head=head)
    assert head in capsys.readouterr().out
    AuditEntry.objects.filter(hash=head).delete()
    assert audit.verify()[2] is None
    with pytest.raises(CommandError, match="expected hash"):
        call_command("verify_audit_log", head=head)


def test_entry_and_action_share_a_transaction() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        audit.record("test.action", actor="ada")
        raise RuntimeError
    assert actions() == []


def test_secrets_are_redacted() -> None:
    redaction.remember(["hunter2hunter2"])
    audit.record("test.action", actor="ada", detail="password hunter2hunter2\x00")
    entry = AuditEntry.objects.get()
    assert "hunter2" not in entry.detail
    assert audit.verify()[2] is None


def test_entries_are_written_to_a_file_as_json(
    settings: Any, tmp_path: Path, django_capture_on_commit_callbacks: Any
) -> None:
    settings.AUDIT_LOG = str(tmp_path / "audit.jsonl")
    with django_capture_on_commit_callbacks(execute=True):
        three()
    rows = [json.loads(line) for line in Path(settings.AUDIT_LOG).read_text().splitlines()]
    assert [row["target"] for row in rows] == ["thing 0", "thing 1", "thing 2"]
    assert rows[1]["previous_hash"] == rows[0]["hash"]
    assert Path(settings.AUDIT_LOG).stat().st_mode & 0o777 == 0o600


# Recorded actions.


def test_sign_in_and_out_with_the_address() -> None:
    cache.clear()
    seed.user("olga", "operator")
    client = Client(REMOTE_ADDR="198.51.100.7")
    client.post("/login", {"username": "olga", "password": "wrong"})
    client.post("/login", {"username": "my secret", "password": "wrong"})
    client.post("/login", {"username": "olga", "password": "correct horse battery"})
    client.post("/logout")
    result = actions(address="198.51.100.7")
    assert result == ["sign_in.failed", "sign_in.failed", "sign_in.succeeded", "sign_out"]
    # A password in the username field is not stored.
    assert not any("my secret" in json.dumps(audit.as_row(e)) for e in AuditEntry.objects.all())


def test_users_and_tokens() -> None:
    admin = seed.user("ada", "admin")
    person = users.add_person("vera", role="viewer", actor=admin)
    users.set_role(person, "operator", actor=admin)
    users.deactivate(person, actor=admin)
    token, text = api_tokens.issue(admin, name="ci", scopes=["read"])
    api_tokens.revoke(token)
    assert actions(actor="ada", action__startswith="user.") == ["user.changed"] * 3
    assert actions(action__startswith="token.") == ["token.created", "token.revoked"]
    assert text not in json.dumps([audit.as_row(e) for e in AuditEntry.objects.all()])


def test_own_password_changes() -> None:
    cache.clear()
    admin, operator_user = seed.user("ada", "admin"), seed.user("olga", "operator")
    client = Client()
    client.force_login(operator_user)
    own = {"old_password": "correct horse battery", "new_password1": "staple-of-92-horses"}
    own["new_password2"] = own["new_password1"]
    assert client.post("/settings/password", own).status_code == 302
    assert actions(actor="olga", action__startswith="user.") == ["user.password_changed"]

    vera = users.add_person("vera", role="viewer", actor=admin)
    visitor = Client()
    uid, token = users.link_parts(vera)
    page = visitor.get(f"/account/choose/{uid}/{token}", follow=True)
    chosen = {"new_password1": "staple-of-93-horses", "new_password2": "staple-of-93-horses"}
    visitor.post(page.redirect_chain[-1][0], chosen)
    [entry] = AuditEntry.objects.filter(actor="vera")
    assert entry.action == "user.password_changed"
    assert "link" in entry.detail
    assert "staple" not in json.dumps([audit.as_row(e) for e in AuditEntry.objects.all()])


def test_credentials_without_their_secrets() -> None:
    from runs.actions.credentials import delete_credential, save_credential

    admin = seed.user("ada", "admin")
    made = Credential(name="cluster", kind="modal")
    save_credential(made, typed={"MODAL_TOKEN_SECRET": "as-very-secret"}, actor=admin)
    delete_credential(made, actor=admin)
    assert actions() == ["credential.saved", "credential.deleted"]
    assert "as-very-secret" not in AuditEntry.objects.get(action="credential.saved").detail
    assert "MODAL_TOKEN_SECRET" in AuditEntry.objects.get(action="credential.saved").detail


def test_actions_on_runs() -> None:
    run = seed.run(seed.user("olga", "operator"), committed=1, replicas=1)
    client = Client(REMOTE_ADDR="198.51.100.7")
    client.force_login(run.owner)
    client.post(f"/runs/{run.pk}/stop")
    entries = AuditEntry.objects.filter(actor="olga", target__contains=str(run.pk))
    assert entries.filter(address="198.51.100.7").exists()


def test_a_denial_is_recorded_once_a_minute() -> None:
    cache.clear()
    run = seed.run(seed.user("olga", "operator"), committed=1, replicas=1)
    client = Client()
    client.force_login(seed.user("vera", "viewer"))
    for _ in range(5):
        assert client.post(f"/runs/{run.pk}/stop").status_code == 403
    [entry] = AuditEntry.objects.filter(action="access.denied")
    assert (entry.actor, entry.target) == ("vera", f"POST /runs/{run.pk}/stop")


def test_the_administration_shows_it_to_administrators_and_changes_nothing() -> None:
    [entry, *_] = three()
    client = Client()
    client.force_login(seed.user("ada", "admin"))
    assert client.get("/admin/runs/auditentry/").status_code == 200
    page = f"/admin/runs/auditentry/{entry.pk}/change/"
    assert client.get(page).status_code == 200
    assert client.post(page, {"actor": "eve"}).status_code == 403
    assert (
        client.post(f"/admin/runs/auditentry/{entry.pk}/delete/", {"post": "yes"}).status_code
        == 403
    )
    assert client.get("/admin/runs/auditentry/add/").status_code == 403
    assert audit.verify()[2] is None
