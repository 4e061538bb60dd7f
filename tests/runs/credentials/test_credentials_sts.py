"""Temporary keys of one attempt: the request to STS, and their permissions."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest

from diloco.store.base import PART_BYTES, MissingKey, Store, StoreDenied
from diloco.store.fsspec import FsspecStore
from diloco.store.open import open_store
from executors.base import AccountError, RetryLater
from runs.actions.credentials import save_credential, test_credential
from runs.credentials import replica_secrets, sts
from runs.models import Credential, Run
from tests.emulators.s3 import ROLE_ARN
from tests.servers import S3Server

MakeRun = Callable[..., Any]
KEYS = {"AWS_ACCESS_KEY_ID": "asking-key", "AWS_SECRET_ACCESS_KEY": "asking-secret"}
ROLE = "arn:aws:iam::123456789012:role/replicas"


def of_a_role(environment: dict[str, str], **options: Any) -> Credential:
    made = Credential(name="bucket", kind="store", options={"scheme": "s3", **options})
    save_credential(made, typed=environment, actor=None)
    return made


def given(run: Any, *, lifetime_s: float | None = None) -> Any:
    return replica_secrets(run, run.replicas.first(), lifetime_s=lifetime_s)


# A server with STS that enforces session policies.


@pytest.fixture
def two(s3: S3Server, make_run: MakeRun) -> tuple[Any, Any]:
    """Two runs in one bucket with a common prefix, and one credential with a role."""
    credential = of_a_role(s3.env, assume_role_arn=ROLE_ARN)
    runs = [make_run() for _ in range(2)]
    for run, name in zip(runs, ("sts/run", "sts/run-2"), strict=True):
        uri = f"s3://{s3.bucket}/{name}"
        Run.objects.filter(pk=run.pk).update(rendezvous=uri, store_credential=credential)
        run.refresh_from_db()
        open_store(uri, environment=s3.env).put("a/secret", b"of this run")
    return runs[0], runs[1]


def as_replica(run: Any) -> Store:
    return open_store(run.rendezvous, environment=given(run).environment)


@pytest.mark.django_db
@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_replica_can_do_every_operation_in_the_prefix_of_its_run(two: Any, engine: str) -> None:
    store = as_replica(two[0])
    if engine == "s3fs":
        store = FsspecStore(two[0].rendezvous, environment=given(two[0]).environment)
    assert store.get("a/secret") == b"of this run"
    store.put("a/b", b"x")
    assert (store.create("c", b"first"), store.create("c", b"second")) == (True, False)
    store.put_stream("large", lambda: [bytes(PART_BYTES), b"end"])
    assert store.get_range("large", PART_BYTES, 3) == b"end"
    assert [info.key for info in store.list("a/")] == ["a/b", "a/secret"]
    with pytest.raises(MissingKey):
        store.get("not/there")
    store.delete(["a/b", "c", "large"])
    assert [info.key for info in store.list("")] == ["a/secret"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.get("run-2/a/secret"),
        lambda store: store.get("run-2/not/there"),
        lambda store: store.put("run-2/a/b", b"x"),
        lambda store: store.put("run-2/a/secret", b"x"),
        lambda store: store.put_stream("run-2/l", lambda: [bytes(PART_BYTES), b"end"]),
        lambda store: store.list("run-2/"),
        lambda store: store.list(""),
    ],
    ids=["get", "miss", "put", "overwrite", "multipart", "list", "list all"],
)
def test_replica_can_do_nothing_in_the_prefix_of_another_run(
    two: Any, act: Callable[[Store], Any], s3: S3Server
) -> None:
    own, other = two
    above = own.rendezvous.rpartition("/")[0]
    intruder = open_store(above, environment=given(own).environment)
    with pytest.raises(StoreDenied):
        act(intruder)
    assert open_store(other.rendezvous, environment=s3.env).get("a/secret") == b"of this run"


@pytest.mark.django_db
@pytest.mark.parametrize("prefix", ["sts/run", "sts/run-", "sts/", ""])
def test_listing_without_the_slash_shows_no_other_run(two: Any, s3: S3Server, prefix: str) -> None:
    """An S3 client can list keys that begin with the prefix without its slash."""
    import boto3
    from botocore.exceptions import ClientError

    result = given(two[0]).environment
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=result["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=result["AWS_SECRET_ACCESS_KEY"],
        aws_session_token=result["AWS_SESSION_TOKEN"],
    )
    listed = client.list_objects_v2(Bucket=s3.bucket, Prefix="sts/run/")
    assert [item["Key"] for item in listed["Contents"]] == ["sts/run/a/secret"]
    with pytest.raises(ClientError, match="AccessDenied"):
        client.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)


@pytest.mark.django_db
def test_a_replica_deletes_nothing_of_another_run(two: Any, s3: S3Server) -> None:
    """S3 answers a bulk deletion with success and names the refused keys."""
    own, other = two
    above = own.rendezvous.rpartition("/")[0]
    with contextlib.suppress(Exception):
        open_store(above, environment=given(own).environment).delete(["run-2/a/secret"])
    assert open_store(other.rendezvous, environment=s3.env).get("a/secret") == b"of this run"


@pytest.mark.django_db
def test_keys_expire_with_the_attempt_within_the_limit_of_the_role(two: Any) -> None:
    run, _ = two
    assert given(run, lifetime_s=1800).lifetime_s == pytest.approx(1800, abs=2)
    assert given(run, lifetime_s=60).lifetime_s == pytest.approx(900, abs=2)
    assert given(run).lifetime_s == pytest.approx(3600, abs=2)
    assert "secret" not in repr(given(run))


@pytest.mark.django_db
def test_each_attempt_has_its_own_keys(two: Any, s3: S3Server) -> None:
    first, second = given(two[0]).environment, given(two[0]).environment
    assert first["AWS_ACCESS_KEY_ID"] != second["AWS_ACCESS_KEY_ID"] != s3.access_key
    assert first["AWS_ENDPOINT_URL"] == s3.endpoint_url
    assert s3.secret_key not in first.values()


@pytest.mark.django_db
def test_too_long_session_is_refused_with_the_message_of_sts(two: Any, s3: S3Server) -> None:
    run, _ = two
    save_credential(run.store_credential, typed={}, actor=None)
    run.store_credential.options["max_session_s"] = 40_000
    with pytest.raises(AccountError, match=r"AssumeRole .*between 900 and 7200 seconds"):
        given(run, lifetime_s=30_000)


@pytest.mark.django_db
def test_credential_test_checks_the_keys_of_replicas(s3: S3Server) -> None:
    uri = f"s3://{s3.bucket}/tested/run"
    tested = test_credential(of_a_role(s3.env, assume_role_arn=ROLE_ARN), uri)
    assert tested.ok, tested.message
    assert "whose keys open no other prefix and expire after 60 minutes" in tested.message


@pytest.mark.django_db
def test_credential_test_finds_a_role_that_cannot_be_assumed(s3: S3Server) -> None:
    made = of_a_role(s3.env, assume_role_arn=f"{ROLE_ARN}-of-another")
    tested = test_credential(made, f"s3://{s3.bucket}/tested/run")
    assert not tested.ok
    assert "AccessDenied: user test is not authorized to assume role" in tested.message


@pytest.mark.django_db
def test_credential_test_finds_a_store_without_session_policies(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sts.session_policy
    whole = real(f"s3://{s3.bucket}")
    monkeypatch.setattr(sts, "session_policy", lambda uri, **options: whole)
    made = of_a_role(s3.env, assume_role_arn=ROLE_ARN)
    tested = test_credential(made, f"s3://{s3.bucket}/tested/run")
    assert not tested.ok
    assert "does not keep to session policies" in tested.message


# The request.


class Sts(ThreadingHTTPServer):
    """A fake of Amazon's STS that records requests; ``answer`` is its status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[dict[str, str]] = []
        self.signed_by: list[str] = []
        self.answer = 200
        self.error = ("Throttling", "Rate exceeded")


class _Handler(BaseHTTPRequestHandler):
    server: Sts

    def do_POST(self) -> None:
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.server.requests.append({name: value for name, [value] in body.items()})
        self.server.signed_by.append(self.headers["Authorization"])
        now = datetime.datetime.now(datetime.UTC)
        if self.server.answer == 200:
            ends = now + datetime.timedelta(seconds=int(body["DurationSeconds"][0]))
            text = (
                "<AssumeRoleResponse><AssumeRoleResult><Credentials>"
                "<AccessKeyId>ASIAREPLICA</AccessKeyId><SecretAccessKey>minted</SecretAccessKey>"
                f"<SessionToken>session</SessionToken><Expiration>{ends:%Y-%m-%dT%H:%M:%SZ}"
                "</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
            )
        else:
            code, message = self.server.error
            details = f"<Code>{code}</Code><Message>{message}</Message>"
            text = f"<ErrorResponse><Error>{details}</Error></ErrorResponse>"
        data = text.encode()
        self.send_response(self.server.answer)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def amazon() -> Iterator[Sts]:
    with Sts() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(amazon: Sts, environment: Any = KEYS, **options: Any) -> sts.Session:
    lifetime_s = options.pop("lifetime_s", 7200.0)
    uri = options.pop("uri", "s3://bucket/runs/1")
    chosen = {"assume_role_arn": ROLE, "sts_endpoint_url": amazon.url, **options}
    return sts.assume_role(chosen, environment, uri=uri, name="run-0", lifetime_s=lifetime_s)


def test_request_has_role_session_duration_and_policy(amazon: Sts) -> None:
    session = ask(amazon, external_id="isles", max_session_s=5400)
    [request] = amazon.requests
    assert request["Action"] == "AssumeRole"
    assert request["RoleArn"] == ROLE
    assert request["RoleSessionName"] == "run-0"
    assert request["ExternalId"] == "isles"
    assert request["DurationSeconds"] == "5400"
    assert json.loads(request["Policy"]) == sts.session_policy("s3://bucket/runs/1")
    assert "Credential=asking-key/" in amazon.signed_by[0]
    assert dict(session.environment) == {
        "AWS_ACCESS_KEY_ID": "ASIAREPLICA",
        "AWS_SECRET_ACCESS_KEY": "minted",
        "AWS_SESSION_TOKEN": "session",
    }
    assert session.lifetime_s == pytest.approx(5400, abs=2)
    assert "minted" not in repr(session)


def test_policy_covers_exactly_the_prefix() -> None:
    assert sts.session_policy("s3://bucket/runs/1") == {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": "s3:ListBucket",
                "Resource": "arn:aws:s3:::bucket",
                "Condition": {"StringLike": {"s3:prefix": "runs/1/*"}},
            },
            {
                "Effect": "Allow",
                "Action": [
                    "s3:GetObject",
                    "s3:PutObject",
                    "s3:DeleteObject",
                    "s3:AbortMultipartUpload",
                    "s3:ListMultipartUploadParts",
                ],
                "Resource": "arn:aws:s3:::bucket/runs/1/*",
            },
        ],
    }


def allows(policy: dict[str, Any], action: str, resource: str, prefix: str | None = None) -> bool:
    """Return S3's decision for a policy of Allow statements.

    One of them must match action, resource and its condition. A request without ``s3:prefix`` does
    not meet a condition on it.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html
    """
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        assert set(statement) <= {"Effect", "Action", "Resource", "Condition"}
        actions = statement["Action"]
        if not any(
            like(action, one) for one in ([actions] if isinstance(actions, str) else actions)
        ):
            continue
        if not like(resource, statement["Resource"]):
            continue
        condition = statement.get("Condition", {"StringLike": {}})
        assert set(condition) == {"StringLike"}
        if all(
            prefix is not None and like(prefix, wanted)
            for name, wanted in condition["StringLike"].items()
            if name == "s3:prefix"
        ):
            return True
    return False


def like(value: str, pattern: str) -> bool:
    """Match ``*`` and ``?``; ``${*}`` and similar escapes match the character itself."""
    parts = re.split(r"(\$\{[*?$]\}|[*?])", pattern)
    signs = {"*": ".*", "?": "."}
    expression = "".join(
        signs.get(part) or re.escape(part[2] if part.startswith("${") else part) for part in parts
    )
    return re.fullmatch(expression, value, re.DOTALL) is not None


OBJECT_ACTIONS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject")


@pytest.mark.parametrize("key", ["group.json", "rounds/00000001/plan.json", "a b", "*"])
def test_a_policy_opens_every_object_of_the_prefix(key: str) -> None:
    policy = sts.session_policy("s3://team/runs")
    for action in OBJECT_ACTIONS:
        assert allows(policy, action, f"arn:aws:s3:::team/runs/{key}")
    for prefix in ("runs/", "runs/rounds/", f"runs/{key}"):
        assert allows(policy, "s3:ListBucket", "arn:aws:s3:::team", prefix)


@pytest.mark.parametrize(
    "key", ["runs", "runs-other/x", "runsx", "run/x", "x", "Runs/x", "other/runs/x", ""]
)
def test_policy_opens_nothing_outside_the_prefix(key: str) -> None:
    policy = sts.session_policy("s3://team/runs")
    for action in OBJECT_ACTIONS:
        assert not allows(policy, action, f"arn:aws:s3:::team/{key}")
        assert not allows(policy, action, f"arn:aws:s3:::team-b/runs/{key}")
    assert not allows(policy, "s3:ListBucket", "arn:aws:s3:::team", key)
    assert not allows(policy, "s3:ListBucket", "arn:aws:s3:::team")
    assert not allows(policy, "s3:ListBucket", "arn:aws:s3:::team-b", "runs/x")
    assert not allows(policy, "s3:PutBucketPolicy", "arn:aws:s3:::team")


def test_wildcards_in_a_prefix_open_nothing_else() -> None:
    policy = sts.session_policy("s3://team/a*/$b")
    assert allows(policy, "s3:GetObject", "arn:aws:s3:::team/a*/$b/x")
    assert not allows(policy, "s3:GetObject", "arn:aws:s3:::team/ab/$b/x")
    assert not allows(policy, "s3:ListBucket", "arn:aws:s3:::team", "axx/$b/x")


@pytest.mark.parametrize("uri", ["s3://team//runs", "s3://team/runs/..", "s3://Team/runs", "/srv"])
def test_policy_needs_a_canonical_prefix(uri: str) -> None:
    with pytest.raises(AccountError, match="expected"):
        sts.session_policy(uri)


def test_wildcards_are_escaped() -> None:
    policy = sts.session_policy("s3://bucket/a*b/$c")
    assert policy["Statement"][1]["Resource"] == "arn:aws:s3:::bucket/a${*}b/${$}c/*"


def test_policy_for_bucket_partition_and_kms_key() -> None:
    policy = sts.session_policy("s3://bucket", partition="aws-cn", kms_key_arn="arn:aws-cn:kms:k")
    listing, objects, kms = policy["Statement"]
    assert "Condition" not in listing
    assert objects["Resource"] == "arn:aws-cn:s3:::bucket/*"
    assert kms["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]


@pytest.mark.parametrize(
    ("lifetime_s", "longest_s", "expected"),
    [(None, None, 3600), (60.0, None, 900), (1800.5, None, 1800), (86_400.0, 43_200, 43_200)],
)
def test_requested_duration(lifetime_s: float | None, longest_s: int | None, expected: int) -> None:
    assert sts.duration_s(lifetime_s, longest_s) == expected


def test_refusals_need_an_operator_and_other_errors_a_retry(amazon: Sts) -> None:
    amazon.answer, amazon.error = 403, ("AccessDenied", "not authorized")
    with pytest.raises(AccountError, match=f"AssumeRole {ROLE}: AccessDenied: not authorized"):
        ask(amazon)
    amazon.answer, amazon.error = 400, ("Throttling", "Rate exceeded")
    with pytest.raises(RetryLater, match="Rate exceeded"):
        ask(amazon)
    with pytest.raises(RetryLater, match="Could not connect"):
        ask(amazon, sts_endpoint_url="http://127.0.0.1:1")


def test_without_keys_the_server_identity_is_used(
    amazon: Sts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-server")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-server")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    ask(amazon, environment=None)
    assert "Credential=of-the-server/" in amazon.signed_by[0]
    ask(amazon)
    assert "Credential=asking-key/" in amazon.signed_by[1]
