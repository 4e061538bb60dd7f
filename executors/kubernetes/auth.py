"""Configuration of the Kubernetes client: the cluster and the identity.

The credential ``KUBECONFIG`` is the content of a kubeconfig or its path. Without it, the order is:
the file in the environment variable ``KUBECONFIG``, the service account of the server's pod, and
``~/.kube/config``. No global state is set, so several clusters can be used at once.

https://github.com/kubernetes-client/python (``kubernetes.config``),
https://kubernetes.io/docs/tasks/access-application-cluster/access-cluster/
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from executors.base import AccountError

if TYPE_CHECKING:
    from kubernetes.client import Configuration

CREDENTIAL = "KUBECONFIG"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOME_FILE = "~/.kube/config"

# A pasted kubeconfig must neither name files of this machine nor run its programs.
_CLUSTER_FILES = ("certificate-authority",)
_USER_FILES = ("client-certificate", "client-key", "tokenFile", "exec", "auth-provider")

# The client caches certificates in temporary files, and returns a path before the file is written.
_loading = threading.Lock()


def connection(
    credential: str = "",
    *,
    context: str = "",
    environ: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> tuple[Configuration, str]:
    """The client's configuration and its default namespace.

    Raises :class:`AccountError` without a usable credential.
    """
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException

    configuration = Configuration()
    try:
        with _loading:
            if credential and _is_content(credential):
                return configuration, _from_content(credential, context, configuration)
            path = credential or environ.get(CREDENTIAL, "")
            if not path and "KUBERNETES_SERVICE_HOST" in environ and not context:
                return configuration, _in_cluster(configuration, environ, service_account)
            return configuration, _from_file(path or HOME_FILE, context, configuration)
    except (ConfigException, yaml.YAMLError, OSError) as error:
        raise AccountError(f"{CREDENTIAL}: {_message(error)}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AccountError(
            f"{CREDENTIAL}: expected a kubeconfig, found something else ({type(error).__name__})"
        ) from error


def _is_content(credential: str) -> bool:
    return "\n" in credential.strip() or credential.lstrip().startswith(("{", "apiVersion"))


def _from_content(content: str, context: str, into: Configuration) -> str:
    from kubernetes.config import load_kube_config_from_dict

    given = yaml.safe_load(content)
    _check_self_contained(given)
    load_kube_config_from_dict(  # type: ignore[no-untyped-call]
        given, context=context or None, client_configuration=into, persist_config=False
    )
    return _namespace_of(given.get("contexts") or (), context or given.get("current-context", ""))


def _from_file(path: str, context: str, into: Configuration) -> str:
    from kubernetes.config import list_kube_config_contexts, load_kube_config

    if not any(Path(part).expanduser().exists() for part in path.split(os.pathsep) if part):
        raise AccountError(
            f"{CREDENTIAL}: expected a kubeconfig or the path of one, or the service account of "
            f"a pod; found no file {path}"
        )
    load_kube_config(  # type: ignore[no-untyped-call]
        path, context=context or None, client_configuration=into, persist_config=False
    )
    contexts, current = list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
    return _namespace_of(contexts, context or current["name"])


def _in_cluster(into: Configuration, environ: Mapping[str, str], folder: Path) -> str:
    from kubernetes.config.incluster_config import InClusterConfigLoader

    loader: Any = InClusterConfigLoader
    loader(
        token_filename=str(folder / "token"),
        cert_filename=str(folder / "ca.crt"),
        environ=environ,
    ).load_and_set(into)
    namespace = folder / "namespace"
    return namespace.read_text().strip() if namespace.exists() else "default"


def _check_self_contained(given: Any) -> None:
    for kind, fields in (("cluster", _CLUSTER_FILES), ("user", _USER_FILES)):
        for entry in given.get(f"{kind}s") or ():
            found = sorted(set(fields) & set(entry.get(kind) or ()))
            if found:
                raise AccountError(
                    f"{CREDENTIAL}: expected a kubeconfig that holds its certificates and token "
                    f"itself, found {', '.join(found)} in {kind} {entry.get('name')!r}: a stored "
                    "one may neither name files of this machine nor run programs on it"
                )


def _namespace_of(contexts: Any, name: str) -> str:
    for each in contexts:
        if each["name"] == name:
            return str(each["context"].get("namespace") or "default")
    return "default"


def _message(error: Exception) -> str:
    """The error message, without content of the kubeconfig."""
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        return f"expected YAML, found {getattr(error, 'problem', None) or 'something else'}{where}"
    return str(error)
