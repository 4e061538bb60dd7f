"""Hostile objects of every kind under a run's prefix, as a broken replica or a stolen replica
credential could write them: bytes that are not JSON, records with fields of the wrong type, and
well formed records with impossible values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from diloco.protocol import keys
from tests.runs.run_harness import DIGEST, incarnation

Object = tuple[str, bytes]
RECORDS = int(os.environ.get("ARCHIPELAGO_ADVERSARIAL_RECORDS", "40"))
"""Number of hostile records in one example."""

EXTREMES = (
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    10**30,
    0.0,
    -0.0,
    5e-324,
    1e-300,
    1e99,
    1e101,
    1e308,
    -1.7e308,
    1.7976931348623157e308,
    math.nan,
    math.inf,
    -math.inf,
    4.1e9,
    253402300799.0,
    -62135596800.0,
)
TEXTS = (
    "",
    "\x00",
    "\ud800",
    "=HYPERLINK(1)",
    "<script>",
    "a" * 5000,
    "‮",
    "\r\n\t",
    "'\";--",
    "é" * 300,
    "../../etc/passwd",
    "%s{}",
    "🏝" * 200,
)

PHASES = ("compute", "wait", "upload", "download", "?")

numbers = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 70), st.floats())
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
replicas = st.integers(0, 3)
rounds = st.one_of(st.integers(0, 6), st.sampled_from((1000, 2**31 - 1, 99_999_999)))
seqs = st.integers(1, 3)


def _identity(number: int, seq: int = 1) -> dict[str, Any]:
    return {"replica": number, "incarnation": incarnation(number, seq)}


@st.composite
def _spoilt(draw: Callable[..., Any], body: dict[str, Any]) -> bytes:
    """The record with up to three fields changed, dropped or added, or its bytes damaged."""
    how = draw(st.sampled_from(("fields",) * 4 + ("whole", "cut", "raw", "nested")))
    if how == "raw":
        return draw(st.binary(max_size=60))
    if how == "nested":
        return b'{"v":3,"x":' + draw(st.sampled_from((b"[", b'{"a":'))) * draw(
            st.integers(1, 50_000)
        )
    for _ in range(draw(st.integers(0, 3)) if how == "fields" else 0):
        name = draw(st.sampled_from(sorted(body)))
        match draw(st.sampled_from(("number", "number", "text", "any", "drop", "add"))):
            case "number":
                body[name] = draw(numbers)
            case "text":
                body[name] = draw(texts)
            case "any":
                body[name] = draw(anything)
            case "drop":
                del body[name]
            case "add":
                body[draw(texts)] = draw(anything)
        if not body:
            break
    data = json.dumps({"v": 3, **body}).encode()
    return data[: draw(st.integers(0, len(data)))] if how == "cut" else data


@st.composite
def leases(draw: Callable[..., Any]) -> Object:
    number, seq = draw(replicas), draw(seqs)
    body = {
        **_identity(number, seq),
        "count": draw(st.integers(1, 10**6)),
        "interval_s": draw(numbers),
        "state": draw(st.sampled_from(("syncing", "computing", "done", "failed", "left", "?"))),
        "round": draw(rounds),
        "step": draw(st.integers(0, 100)),
        "tokens": 0,
        "loss": draw(numbers),
        "started_wall_s": 1.0,
        "wall_s": draw(numbers),
        "host": draw(texts),
        "device": draw(texts),
        "message": draw(texts),
    }
    return keys.beat(number, incarnation(number, seq)), draw(_spoilt(body))


@st.composite
def contributions(draw: Callable[..., Any]) -> Object:
    number, seq, round = draw(replicas), draw(seqs), draw(rounds)
    body = {
        "round": round,
        "fragment": 0,
        "base_round": draw(rounds),
        "base_digest": DIGEST,
        **_identity(number, seq),
        "model_hash": "m",
        "codec": "fp32",
        "numel": 10,
        "tokens": draw(st.sampled_from((0, 1000, 2**53, 2**63))),
        "new_tokens": 1000,
        "steps": 10,
        "rounds": draw(st.sampled_from((0, 1, 2**63))),
        "loss": draw(numbers),
        "norm": draw(numbers),
        "size_bytes": 40,
        "digest": DIGEST,
        "compute_s": 6.0,
        "encode_s": 0.1,
        "wall_s": draw(numbers),
    }
    key = keys.contribution_record(min(round, 99_999_999), number, incarnation(number, seq))
    return key, draw(_spoilt(body))


@st.composite
def plans(draw: Callable[..., Any]) -> Object:
    round = draw(rounds)
    planned = st.fixed_dictionaries(
        {
            "replica": replicas,
            "incarnation": st.just(incarnation(0)),
            "weight": numbers,
            "tokens": st.integers(0, 2**53),
            "new_tokens": st.just(1),
            "steps": st.just(10),
            "rounds": st.integers(-1, 2**40),
            "compute_s": st.just(1.0),
            "loss": numbers,
            "size_bytes": st.just(40),
            "digest": st.just(DIGEST),
        }
    )
    refused = st.fixed_dictionaries(
        {"replica": replicas, "incarnation": texts, "reason": texts, "kind": texts}
    )
    late = st.fixed_dictionaries(
        {
            "replica": replicas,
            "units": numbers,
            "missed": st.integers(-1, 2**40),
            "away": st.booleans(),
        }
    )
    body = {
        "round": round,
        "fragment": 0,
        "mode": draw(texts),
        "planner": _identity(0),
        "contributions": draw(st.lists(planned, max_size=4)),
        "refused": draw(st.lists(refused, max_size=4)),
        "late": draw(st.lists(late, max_size=4)),
        "steady_rounds": draw(st.integers(-1, 2**63)),
        "wall_s": draw(numbers),
    }
    return keys.plan(min(round, 99_999_999)), draw(_spoilt(body))


@st.composite
def commits(draw: Callable[..., Any]) -> Object:
    round = draw(rounds)
    body = {
        "round": round,
        "fragment": draw(st.sampled_from((0, 2**31))),
        "committer": _identity(0),
        "contributors": [_identity(n) for n in draw(st.lists(replicas, max_size=4))],
        "merged_digest": DIGEST,
        "void": draw(st.one_of(st.just(""), texts)),
        "void_replica": draw(st.one_of(st.none(), replicas)),
        "tokens_total": draw(st.sampled_from((0, 4000, 2**53, 2**63 - 1))),
        "committed_total": 1,
        "loss": draw(st.one_of(st.none(), numbers)),
        "wall_s": draw(numbers),
    }
    return keys.commit(min(round, 99_999_999)), draw(_spoilt(body))


def _stored() -> dict[str, Any]:
    return {"key": "checkpoints/x", "size_bytes": 4096, "sha256": DIGEST}


@st.composite
def manifests(draw: Callable[..., Any]) -> Object:
    round, final = draw(rounds), draw(st.booleans())
    weights = {**_stored(), "size_bytes": draw(numbers), "key": draw(texts)}
    if final:
        body = {
            "round": round,
            "reason": draw(st.sampled_from(("completed", "stopped", "?"))),
            "writer": _identity(0),
            "weights_digest": DIGEST,
            "weights": weights,
            "config": _stored(),
            "summary": _stored(),
            "wall_s": draw(numbers),
        }
        return keys.FINAL_MANIFEST, draw(_spoilt(body))
    body = {
        "round": round,
        "writer": _identity(0),
        "model_hash": draw(texts),
        "base_rounds": [round],
        "tensors": [],
        "weights_digest": DIGEST,
        "weights": weights,
        "outer": None,
        "tokens_total": 1,
        "wall_s": draw(numbers),
    }
    return keys.checkpoint_manifest(min(round, 99_999_999)), draw(_spoilt(body))


@st.composite
def segments(draw: Callable[..., Any]) -> Object:
    number, seq, n = draw(replicas), draw(seqs), draw(st.integers(1, 5 + RECORDS // 40))
    length = draw(st.integers(0, 5))
    first = draw(st.sampled_from((1, 1, 1, 30, 2**40)))

    def column(values: Any) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    times = st.one_of(st.just(1_893_500_000.0), st.just(1_893_500_000.0), numbers)
    phases = st.dictionaries(
        st.sampled_from(("compute", "wait", "upload", "download", "?")), numbers
    )
    report = st.fixed_dictionaries(
        {
            "round": rounds,
            "outcome": st.sampled_from(("included", "late", "void", "?")),
            "started_wall_s": numbers,
            "committed_wall_s": numbers,
            "phases": phases,
            "background": phases,
            "bytes_up": st.sampled_from((0, 100, 2**53)),
            "bytes_down": st.just(3),
            "requests": st.just(1),
            "norm": numbers,
            "update_norm": numbers,
            "contributors": st.just(2),
            "weights_digest": texts,
            "step": st.integers(0, 40),
            "tokens": st.just(5),
            "cosine": st.one_of(st.none(), numbers),
        }
    )
    evaluation = st.fixed_dictionaries(
        {"round": rounds, "loss": numbers, "tokens": st.just(0), "wall_s": times}
    )
    line = st.fixed_dictionaries({"wall_s": numbers, "level": texts, "message": texts})
    body = {
        **_identity(number, seq),
        "n": n,
        "wall_s": draw(times),
        "state": "computing",
        "round": 1,
        "steps": {
            "step": list(range(first, first + length)),
            "round": column(st.integers(0, 4)),
            "wall_s": column(times),
            "tokens": column(st.sampled_from((0, 5, 2**53))),
            "loss": column(numbers),
            "lr": column(numbers),
            "grad_norm": column(numbers),
            "step_s": column(numbers),
        },
        "rounds": draw(st.lists(report, max_size=4)),
        "evaluations": draw(st.lists(evaluation, max_size=3)),
        "logs": draw(st.lists(line, max_size=3)),
        "system": draw(st.dictionaries(st.sampled_from(("gpu_busy", "rss_bytes", "?")), numbers)),
        "last": draw(st.booleans()),
    }
    return keys.telemetry(number, incarnation(number, seq), n), draw(_spoilt(body))


@st.composite
def journals(draw: Callable[..., Any]) -> Object:
    body = {"format": "archipelago.journal", "n": 1, "wall_s": 1.0, "run": draw(anything)}
    return keys.journal(draw(st.integers(40, 50))), draw(_spoilt(body))


@st.composite
def commands(draw: Callable[..., Any]) -> Object:
    n = draw(st.integers(1, 6))
    body = {
        "n": n,
        "command": draw(texts),
        "replica": draw(numbers),
        "arguments": {},
        "wall_s": 1.0,
    }
    return keys.control(n), draw(_spoilt(body))


@st.composite
def samples(draw: Callable[..., Any]) -> Object:
    body = {
        "round": draw(rounds),
        "prompt": draw(texts),
        "text": draw(texts),
        "temperature": draw(numbers),
        "seed": draw(st.integers()),
        "whole": True,
        "wall_s": 1.0,
    }
    return keys.final_sample(0, incarnation(0)), draw(_spoilt(body))


hostile = st.one_of(
    leases(),
    contributions(),
    plans(),
    commits(),
    manifests(),
    segments(),
    segments(),
    segments(),
    journals(),
    commands(),
    samples(),
)
