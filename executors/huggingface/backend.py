"""The backend ``huggingface``: Hugging Face Jobs."""

from __future__ import annotations

from executors.backend import Backend, Variable
from executors.huggingface.hardware import TABLE
from executors.huggingface.options import Options

BACKEND = Backend(
    name="huggingface",
    label="Hugging Face Jobs",
    executor="executors.huggingface.executor:HFJobsExecutor",
    hardware=TABLE,
    options=Options,
    variables=(
        Variable(
            name="HF_TOKEN",
            label="Token",
            required=True,
            help="Needs the permission to start and manage Jobs",
        ),
    ),
    public_variables=frozenset({"HF_ENDPOINT"}),
    console_url="https://huggingface.co/jobs/{namespace}/{job_id}",
    demo_hardware="cpu-basic",
)
