"""Environment variables that a local replica inherits: those a program needs to run and to reach a
bucket. The control plane's secrets (database, broker, signing key) are not inherited."""

from __future__ import annotations

import os
from collections.abc import Mapping

_INHERITED = frozenset(
    (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "CUDA_HOME",
        "PYTHONPYCACHEPREFIX",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    )
)
_INHERITED_PREFIXES = (
    "LC_",
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "GCSFS_",
    "STORAGE_",
    "FSSPEC_",
    "HF_",
    "NVIDIA_",
)
_STORES = (
    (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_",
        "AWS_ENDPOINT_URL",
        "AWS_ROLE_ARN",
        "AWS_WEB_IDENTITY_",
        "FSSPEC_S3",
    ),
    ("AZURE_STORAGE_", "FSSPEC_AZ", "FSSPEC_ABFS"),
    ("GOOGLE_APPLICATION_", "STORAGE_", "FSSPEC_GS", "FSSPEC_GCS"),
    ("HF_TOKEN", "HF_ENDPOINT", "FSSPEC_HF"),
)
"""Prefixes of the variables that locate and authenticate each kind of bucket. A replica with a
secret of a kind inherits no variable of that kind: the two identities must not mix."""
_DEFAULTS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def replica_environment(given: Mapping[str, str], *, secrets: Mapping[str, str]) -> dict[str, str]:
    """Inherited variables, then one thread for OpenMP and MKL, then ``given`` and ``secrets``."""
    replaced = tuple(
        prefix
        for prefixes in _STORES
        if any(name.startswith(prefixes) for name in secrets)
        for prefix in prefixes
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED
        or (name.startswith(_INHERITED_PREFIXES) and not name.startswith(replaced))
    }
    return {**inherited, **_DEFAULTS, **given, **secrets}
