"""Where the agreement store is, as text: `etcd://h1:2379,h2:2379/NAME`, or a directory of this machine."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from upper.cluster.agreement import AgreementStore
from upper.cluster.agreement.embedded import EmbeddedStore
from upper.cluster.agreement.etcd import EtcdStore
from upper.errors import ClusterError

PORT = 2379
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SHAPE = "a store is etcd://HOST[:PORT][,HOST...]/NAME, etcds://... for TLS, or a directory"


def open_store(
    location: str, *, user: str = "", password: str = "", tls: ssl.SSLContext | None = None
) -> AgreementStore:
    """Open the store that `location` names. Credentials are no part of it: locations appear in logs."""
    scheme, found, rest = location.partition("://")
    if not found:
        return EmbeddedStore(Path(location).absolute())
    if scheme not in ("etcd", "etcds"):
        raise ClusterError(f"{scheme}:// is not an agreement store; {SHAPE}")
    hosts, _, name = rest.partition("/")
    if "@" in hosts:
        raise ClusterError(
            "an agreement store takes its user and password from options, not from its address"
        )
    if not NAME.fullmatch(name):
        raise ClusterError(f"{name!r} is not a name for a cluster (letters, digits, . _ -); {SHAPE}")
    endpoints = [_endpoint(host) for host in hosts.split(",")]
    if scheme == "etcds" and tls is None:
        tls = ssl.create_default_context()
    return EtcdStore(endpoints, name, tls=tls if scheme == "etcds" else None, user=user, password=password)


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = (
        text.rpartition(":") if re.search(r":\d*$", text) and not text.endswith("]") else (text, "", "")
    )
    if not host or (port and not 0 < int(port) < 65536):
        raise ClusterError(f"{text!r} is not a host and a port; {SHAPE}")
    return host.strip("[]"), int(port) if port else PORT
