"""The backend ``modal``: Modal Sandboxes."""

from __future__ import annotations

from executors.backend import Backend, Variable
from executors.modal.hardware import TABLE
from executors.modal.options import Options

BACKEND = Backend(
    name="modal",
    label="Modal",
    executor="executors.modal.executor:ModalExecutor",
    hardware=TABLE,
    options=Options,
    variables=(
        Variable(name="MODAL_TOKEN_ID", label="Token ID", required=True),
        Variable(name="MODAL_TOKEN_SECRET", label="Token secret", required=True),
    ),
    public_variables=frozenset({"MODAL_ENVIRONMENT", "MODAL_SERVER_URL"}),
    console_url="https://modal.com/id/{id}",
    demo_hardware="cpu",
)
