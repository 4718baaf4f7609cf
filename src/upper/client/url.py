"""Where a bucket is: `upr://user:password@host:port,host:port/bucket?tls=on&timeout=5`.

The scheme names the dialect in which changes are followed; key-value calls are the same in all of
them. Every part but the host may be left out. Nothing here resolves names or opens anything.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote

from upper.errors import BadUrl

DEFAULT_PORT = 11210
DEFAULT_BUCKET = "default"
DIALECTS = ("upr", "upr0", "tap")
SETTINGS = ("tls", "ca", "timeout", "name")
_ON = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """One node of a cluster, by the address at which it takes connections."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """True where bytes do not leave this machine."""
        if self.host in ("localhost", ""):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Address:
    """Everything that a URL says."""

    dialect: str
    nodes: tuple[Node, ...]
    bucket: str = DEFAULT_BUCKET
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        """The URL again, without the password: fit for a log."""
        user = f"{self.user}@" if self.user else ""
        return f"{self.dialect}://{user}{','.join(map(str, self.nodes))}/{self.bucket}"

    @property
    def tls(self) -> bool:
        return _ON[self.settings.get("tls", "off")]

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may take, where the URL says so."""
        text = self.settings.get("timeout")
        return None if text is None else float(text)


def parse_url(url: str) -> Address:
    """What a URL says, or a sentence about what it should have said."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise BadUrl(f"{_shown(url)} is no URL; write it as upr://HOST:PORT/BUCKET")
    secure = scheme.endswith("s") and scheme[:-1] in DIALECTS
    dialect = scheme[:-1] if secure else scheme
    if dialect == "dcp":
        raise BadUrl("dcp:// is not spoken here yet; use upr:// with the same host and port")
    if dialect not in DIALECTS:
        raise BadUrl(f"{scheme}:// is not known; use one of {', '.join(f'{name}://' for name in DIALECTS)}")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    user, colon, password = userinfo.partition(":")
    if at and not user:
        raise BadUrl("the URL has an @ but no user before it; write upr://USER:PASSWORD@HOST:PORT/BUCKET")
    bucket = unquote(path)
    if "/" in bucket:
        raise BadUrl(
            f"the path of a URL names one bucket, and {bucket!r} is not one; write upr://HOST:PORT/BUCKET"
        )
    settings = _settings(query)
    if secure:
        settings["tls"] = "on"
    return Address(
        dialect,
        tuple(dict.fromkeys(parse_node(host) for host in hosts.split(","))),
        bucket or DEFAULT_BUCKET,
        unquote(user) if at else None,
        unquote(password) if colon else None,
        MappingProxyType(settings),
    )


def parse_node(text: str) -> Node:
    """`host`, `host:port`, `[v6]` or `[v6]:port`."""
    if text.startswith("["):
        host, bracket, tail = text[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise BadUrl(f"{text!r} is not an address; write an IPv6 host as [::1]:{DEFAULT_PORT}")
        port = tail[1:]
    elif text.count(":") > 1:
        raise BadUrl(f"{text!r} is not an address; write an IPv6 host as [::1]:{DEFAULT_PORT}")
    else:
        host, _, port = text.partition(":")
    if not host:
        raise BadUrl("the URL names no host; write upr://HOST:PORT/BUCKET")
    if not port:
        return Node(host)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadUrl(f"{port!r} is not a port; give a number from 1 to 65535")
    return Node(host, int(port))


def _settings(query: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in SETTINGS:
            raise BadUrl(f"the URL has no setting {name!r}; there are {', '.join(SETTINGS)}")
        settings[name] = value
    if settings.setdefault("tls", "off") not in _ON:
        raise BadUrl(f"tls={settings['tls']} is neither on nor off")
    try:
        if float(settings.get("timeout", "1")) <= 0:
            raise ValueError
    except ValueError:
        raise BadUrl(f"timeout={settings['timeout']} is not a number of seconds above 0") from None
    return settings


def _shown(url: str) -> str:
    """A URL that could not be read, without what may be a password."""
    return repr(url.rpartition("@")[2])
