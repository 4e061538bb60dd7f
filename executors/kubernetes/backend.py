"""The backend ``kubernetes``: Jobs of a Kubernetes cluster."""

from __future__ import annotations

from executors.backend import Backend, Variable
from executors.kubernetes.hardware import TABLE
from executors.kubernetes.options import Options

BACKEND = Backend(
    name="kubernetes",
    label="Kubernetes",
    executor="executors.kubernetes.executor:KubernetesExecutor",
    hardware=TABLE,
    options=Options,
    variables=(
        Variable(
            name="KUBECONFIG",
            label="kubeconfig",
            required=True,
            long=True,
            help="The content of the file, with token and certificates inside",
        ),
    ),
    demo_hardware="cpu",
)
