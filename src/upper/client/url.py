"""Bucket URLs and credentials: `upr://user:password@host:port,host:port/bucket?tls=on&timeout=5`.

The scheme selects the dialect of change streams; key-value calls are the same in all dialects.
`couchbase://` is DCP, `couchbases://` is DCP over TLS with Couchbase's port. Every part except the host is
optional. The password may also come from an argument, a callable, a file or the
environment variable UPPER_PASSWORD, and the URL itself from UPPER_URL. No error message and no `repr`
contains a password. Nothing here resolves names or opens connections.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote

from upper.errors import AuthenticationFailed, BadUrl
from upper.wire.codes import ALIASES, SCHEMES

# A password, a function that returns it, or a file whose first line holds it. The last two are read at every
# login, so a changed password takes effect without a restart.
Secret: TypeAlias = str | Callable[[], str] | Path

DEFAULT_PORT = 11210
COUCHBASE_TLS_PORT = 11207  # of couchbases://
DEFAULT_BUCKET = "default"
SETTINGS = ("tls", "ca", "timeout", "name")
_ON = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


@dataclass(frozen=True, slots=True, order=True)
class NodeAddress:
    """The host and port of one cluster node."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether the host is this machine, so that no byte crosses a network."""
        if self.host in ("localhost", ""):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a URL, and the credentials."""

    dialect: str
    nodes: tuple[NodeAddress, ...]
    bucket: str = DEFAULT_BUCKET
    user: str | None = None
    password: Secret | None = field(default=None, repr=False)
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        """The URL without the password and the settings, for logs."""
        user = f"{self.user}@" if self.user else ""
        return f"{self.dialect}://{user}{','.join(map(str, self.nodes))}/{self.bucket}"

    @property
    def tls(self) -> bool:
        return _ON[self.settings.get("tls", "off")]

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may take; None where the URL does not set it."""
        text = self.settings.get("timeout")
        return None if text is None else float(text)

    def read_password(self) -> str:
        """The password as text; empty where none is set."""
        match self.password:
            case None:
                return ""
            case str():
                return self.password
            case Path():
                return password_in(self.password)
            case _:
                return self.password()


def password_in(file: Path) -> str:
    """The first line of a file."""
    try:
        return file.read_text().partition("\n")[0].removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise AuthenticationFailed(f"password file {file} cannot be read ({why}); make it readable") from None


def address_of(url: str | None, *, user: str | None = None, password: Secret | None = None) -> Address:
    """The address in a URL, or without one in the environment. Arguments override the URL.

    A user without a password gets the one in UPPER_PASSWORD, if that is set.
    """
    url = url or os.environ.get("UPPER_URL")
    if not url:
        raise BadUrl("no URL is given; pass upr://HOST:PORT/BUCKET, or set UPPER_URL")
    address = parse_url(url)
    if user is not None:
        address = replace(address, user=user, password=None if user != address.user else address.password)
    if password is None and address.password is None and address.user is not None:
        password = os.environ.get("UPPER_PASSWORD")
    if password is None:
        return address
    if address.user is None:
        raise BadUrl("a password is given without a user; pass user=, or write upr://USER@HOST:PORT/BUCKET")
    return replace(address, password=password)


def parse_url(url: str) -> Address:
    """Parse a URL, or raise BadUrl with the correct form."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.isalnum():
        raise BadUrl(f"{_without_userinfo(url)} is not a URL; write it as upr://HOST:PORT/BUCKET")
    known = (*SCHEMES, *ALIASES)
    secure = scheme.endswith("s") and scheme[:-1] in known
    name = scheme[:-1] if secure else scheme
    if name not in known:
        raise BadUrl(f"{scheme}:// is not known; use one of {', '.join(f'{one}://' for one in known)}")
    port = COUCHBASE_TLS_PORT if secure and name in ALIASES else DEFAULT_PORT
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    user, colon, password = userinfo.partition(":")
    if at and not user:
        raise BadUrl("the URL has an @ but no user before it; write upr://USER@HOST:PORT/BUCKET")
    if not at and "@" in path + query:
        # What precedes the @ was meant as a password, so it must not be quoted as a port or a bucket.
        raise BadUrl(
            "the user or password of the URL contains / or ?; write them as %2F and %3F, "
            "or pass the password separately"
        )
    bucket = unquote(path)
    if "/" in bucket:
        raise BadUrl(
            f"the path of a URL names one bucket, and {bucket!r} is not one; write upr://HOST:PORT/BUCKET"
        )
    settings = _settings(query)
    if secure:
        settings["tls"] = "on"
    return Address(
        ALIASES.get(name, name),
        tuple(dict.fromkeys(parse_node(host, port) for host in hosts.split(","))),
        bucket or DEFAULT_BUCKET,
        unquote(user) if at else None,
        unquote(password) if colon else None,
        MappingProxyType(settings),
    )


def parse_node(text: str, default: int = DEFAULT_PORT) -> NodeAddress:
    """Parse `host`, `host:port`, `[v6]` or `[v6]:port`."""
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
        return NodeAddress(host, default)
    if not (port.isascii() and port.isdigit()):
        # Not quoted: in upr://USER:PASSWORD without a host this is the password.
        raise BadUrl(f"the port of {host!r} is not a number; write upr://HOST:PORT/BUCKET")
    if not 0 < int(port) < 65536:
        raise BadUrl(f"{port!r} is not a port; give a number from 1 to 65535")
    return NodeAddress(host, int(port))


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


def _without_userinfo(url: str) -> str:
    return repr(url.rpartition("@")[2])
