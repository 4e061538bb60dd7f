"""One run on five backends at once, through their real SDKs: it trains, loses a machine, and ends.

Four of the backends are emulated here (:mod:`tests.emulators`), and really start what they are
asked to start; the rendezvous is a bucket of a real S3 server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lives import create, wait_for
from tests.emulators.together import BACKENDS, Together, running_together
from tests.stack import LiveStack, running_stack

pytestmark = pytest.mark.processes

POOLS = [
    {"backend": "local", "hardware": "cpu"},
    {"backend": "modal", "hardware": "cpu"},
    {"backend": "huggingface", "hardware": "cpu-basic"},
    {"backend": "sagemaker", "hardware": "ml.m5.large"},
    {"backend": "kubernetes", "hardware": "cpu"},
]
NUMBER = {pool["backend"]: number for number, pool in enumerate(POOLS)}


@pytest.fixture(scope="module")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with running_together(tmp_path_factory.mktemp("islands")) as made:
            yield made
    finally:
        del os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def stack(
    islands: Together, tmp_path_factory: pytest.TempPathFactory, own_database: None
) -> Iterator[LiveStack]:
    with running_stack(tmp_path_factory.mktemp("var"), **islands.env) as made:
        yield made


def contributed(stack: LiveStack, run: str) -> set[int]:
    """Numbers of the replicas that were included in a round."""
    said = stack.python(
        "from runs.models import Contribution\n"
        f"rows = Contribution.objects.filter(round__run={run!r}, state='included')\n"
        "print(*sorted(set(rows.values_list('replica__number', flat=True))))"
    )
    return {int(number) for number in said.split()}


def included_by(stack: LiveStack, run: str, number: int, attempt: int) -> int:
    """In how many rounds that replica's attempt was included; incarnations count attempts."""
    said = stack.python(
        "from runs.models import Contribution\n"
        f"print(Contribution.objects.filter(round__run={run!r}, state='included',"
        f" replica__number={number}, incarnation__startswith='{attempt:05d}-').count())"
    )
    return int(said)


def test_a_run_on_five_backends_survives_a_preemption(islands: Together, stack: LiveStack) -> None:
    lost = NUMBER["kubernetes"]
    run = create(
        stack, "five islands", pools=POOLS, num_replicas=5, min_quorum=2, start_replicas=5,
        total_rounds=400, sync_every=3, checkpoint_every=10,
    )  # fmt: skip
    wait_for(stack, run, lambda seen: seen["rounds"] >= 2, timeout_s=240)
    assert contributed(stack, run) == set(NUMBER.values())

    islands.kubernetes.preempt(key_of(stack, run, lost, attempt=1))
    seen = wait_for(
        stack, run, lambda seen: included_by(stack, run, lost, attempt=2) > 0, timeout_s=240
    )
    stack.python(
        "from runs.models import Run; from runs.actions.replicas_and_pools import request_stop\n"
        f"request_stop(Run.objects.get(pk={run!r}), actor=None, reason='seen enough')"
    )
    seen = finished(stack, run)

    attempts = {(a["replica__pool__backend"], a["launch_key"][-1]): a for a in seen["attempts"]}
    assert set(attempts) == {(pool["backend"], "1") for pool in POOLS} | {("kubernetes", "2")}
    assert attempts["kubernetes", "1"]["cause"] == "preempted"
    assert seen["restarts"] == [0] * 5, "a preemption is nobody's failure"
    *rounds, _ = [state for _, state, _ in seen["contributions"]]  # the stop cuts the last short
    assert set(rounds) == {"committed"}
    assert "at round" in seen["reason"]
    priced = [a["cost_usd"] for a in seen["attempts"] if a["cost_usd"] is not None]
    assert seen["cost_usd"] == pytest.approx(sum(priced))
    assert seen["cost_usd"] > 0
    for backend in BACKENDS:
        assert all(job.state == "ended" for job in islands.processes(backend).all()), backend
    nothing_secret_is_told(islands, stack, seen)


def key_of(stack: LiveStack, run: str, number: int, *, attempt: int) -> str:
    return f"{run.replace('-', '')[:12]}-{number}-{attempt}"


def finished(stack: LiveStack, run: str) -> dict[str, Any]:
    """How the run is once it has been stopped and every job has ended."""
    from tests.e2e.lives import look
    from tests.servers import wait_until

    seen: dict[str, Any] = {}

    def over() -> bool:
        seen.update(look(stack, run))
        return seen["state"] == "cancelled" and all(a["cause"] for a in seen["attempts"])

    wait_until(over, f"the end of run {run}", timeout_s=120)
    return seen


def nothing_secret_is_told(islands: Together, stack: LiveStack, seen: dict[str, Any]) -> None:
    """Not in commands of jobs, rows, or logs: what opens the bucket and the backends."""
    secrets = {
        islands.s3.secret_key,
        islands.env["HF_TOKEN"],
        islands.env["MODAL_TOKEN_SECRET"],
    }
    told = [str(seen)]
    told += [" ".join(job.command) for b in BACKENDS for job in islands.processes(b).all()]
    told += [stack.log(name) for name in ("worker", "beat", "web")]
    told += [Path(path).read_text(errors="replace") for path in (stack.var / "jobs").glob("*/log")]
    for text in told:
        for secret in secrets:
            assert secret not in text
