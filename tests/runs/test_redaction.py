"""Secrets are redacted by value, in every form in which a library can repeat them."""

from __future__ import annotations

import json

import pytest

from runs import redaction
from runs.redaction import Known

OUT = redaction.STRUCK_OUT


def struck(secret: str, text: str) -> str:
    known = Known()
    known.add([secret], passing=False)
    return known.strike_out(text)


@pytest.mark.parametrize(
    ("secret", "text", "expected"),
    [
        ("a-token-of-ours", "b'Bearer a-token-of-ours'", f"b'Bearer {OUT}'"),
        ("  a-token-of-ours\n", "(a-token-of-ours)", f"({OUT})"),
        ("a/key+of=ours", "?sig=a%2Fkey%2Bof%3Dours&x", f"?sig={OUT}&x"),
        ("a/key+of=ours", "?sig=a/key%2Bof%3Dours&x", f"?sig={OUT}&x"),
        ("<a-key>&more", "<pre>&lt;a-key&gt;&amp;more</pre>", f"<pre>{OUT}</pre>"),
        ("AccountName=isles;AccountKey=bmljZQ==;X=y", "bmljZQ== of isles", f"{OUT} of isles"),
        ("short", "short", "short"),
    ],
)
def test_secret_is_redacted(secret: str, text: str, expected: str) -> None:
    assert struck(secret, text) == expected


def test_only_the_secrets_of_a_document_are_redacted() -> None:
    key = {
        "type": "service_account",
        "project_id": "our-project",
        "private_key": "-----BEGIN-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END-----\n",
        "token_uri": "https://oauth2.example/token",
    }
    text = "MIIEvQIBADANBg of our-project at https://oauth2.example/token -----BEGIN-----"
    expected = f"{OUT} of our-project at https://oauth2.example/token -----BEGIN-----"
    assert struck(json.dumps({"token": key}), text) == expected
    kubeconfig = (
        "clusters: [{name: isles-cluster, cluster: {server: 'https://k8s.example'}}]\n"
        "users: [{name: us, user: {token: eyJhbGciOi.x, client-key-data: LS0tLS1CRUdJ}}]\n"
    )
    text = "https://k8s.example isles-cluster eyJhbGciOi.x LS0tLS1CRUdJ"
    assert struck(kubeconfig, text) == f"https://k8s.example isles-cluster {OUT} {OUT}"


def test_nested_secret_is_redacted_completely() -> None:
    known = Known()
    known.add(["a-secret", "a-secret-that-is-longer"], passing=False)
    assert known.strike_out("a-secret-that-is-longer, a-secret") == f"{OUT}, {OUT}"


def test_newest_temporary_secrets_and_all_lasting_ones_are_remembered() -> None:
    known = Known()
    known.add(["lasting-secret"], passing=False)
    for n in range(redaction.PASSING + 1):
        known.add([f"passing-secret-{n:04d}"], passing=True)
    newest = f"passing-secret-{redaction.PASSING:04d}"
    assert known.strike_out(f"lasting-secret {newest}") == f"{OUT} {OUT}"
    assert known.strike_out("passing-secret-0000") == "passing-secret-0000"


def test_documents_of_any_shape_are_read_in_bounded_time() -> None:
    deep = '{"token":' * 5000 + '"a-token-of-ours"' + "}" * 5000
    assert struck(deep, "a-token-of-ours") == "a-token-of-ours", "too deep to be read"
    nested = '{"a":' * 900 + '{"token": "a-token-of-ours"}' + "}" * 900
    assert struck(nested, "a-token-of-ours") == OUT
    lines = ["a0: &a0 {token: a-token-of-ours}"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert struck("\n".join(lines), "a-token-of-ours") == OUT
