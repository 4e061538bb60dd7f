"""Executors by backend name, made with what the control plane knows."""

from __future__ import annotations

import importlib
from typing import Any, cast

from executors.base import ExecutorConfig, ServerlessExecutor

BACKENDS = {
    "local": "Local processes on this machine",
    "modal": "Modal",
    "huggingface": "Hugging Face Jobs",
    "sagemaker": "Amazon SageMaker",
    "kubernetes": "Kubernetes",
}
"""Backend name -> what a form calls it."""

CLASSES = {
    "local": "executors.local.executor:LocalProcessExecutor",
    "modal": "executors.modal.executor:ModalExecutor",
    "huggingface": "executors.huggingface.executor:HFJobsExecutor",
    "sagemaker": "executors.sagemaker.executor:SageMakerExecutor",
    "kubernetes": "executors.kubernetes.executor:KubernetesExecutor",
}
"""Backend name -> where its class is; the module, and its SDK, is loaded when it is asked for."""

OPTION_MODULES = {
    "local": "executors.local.options",
    "modal": "executors.modal.options",
    "huggingface": "executors.huggingface.request",
    "sagemaker": "executors.sagemaker.request",
    "kubernetes": "executors.kubernetes.options",
}
"""Backend name -> the module that declares ``POOL_OPTIONS``."""


def pool_options(backend: str) -> frozenset[str]:
    """Options that a pool can set without a pattern of its credential. Any other option is
    restricted, also one that a backend has added and not declared."""
    try:
        found: frozenset[str] = importlib.import_module(OPTION_MODULES[backend]).POOL_OPTIONS
    except (KeyError, ImportError):
        return frozenset()
    return found


def get_executor(backend: str, config: ExecutorConfig) -> ServerlessExecutor:
    """The executor of ``backend``. Raises :class:`ValueError` for an unknown name."""
    return cast(ServerlessExecutor, executor_class(backend)(config))


def executor_class(backend: str) -> Any:
    """What makes one of an :class:`~executors.base.ExecutorConfig`. Raises :class:`ValueError` for
    an unknown name, :class:`ImportError` where the backend's client is not installed."""
    if backend not in CLASSES:
        raise ValueError(f"expected a backend of {', '.join(BACKENDS)}, found {backend!r}")
    module, _, name = CLASSES[backend].partition(":")
    return getattr(importlib.import_module(module), name)
