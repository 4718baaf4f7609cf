"""The few pages of Couchbase's REST interface that some of its clients request, on a separate port.

Most clients need none of them: they read the map from the key-value port. The pages name the nodes, the
bucket and its partitions, and change nothing. They are for users of the node: a request carries name and
password, which is why it is answered over TLS or to this machine alone. A node without users requires none.

A map is sent once the batch that made it is on disk, like the one on the key-value port: its revision never
goes back. A streaming page is sent again whenever the map has changed, until the client leaves.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, unquote

from upper.errors import AuthenticationFailed, Busy
from upper.server.cluster_map import ANY_HOST
from upper.server.http import HttpPage, HttpRequest
from upper.server.settings import is_loopback

if TYPE_CHECKING:
    from upper.server.node import Node

JSON = "application/json"
BETWEEN = b"\n\n\n\n"  # maps of a streaming page
LOOK = 0.25  # seconds between two looks at the map
# Clients derive from it what a server can do: expirations and durability levels, but no collections.
COMPATIBLE = "6.6.0-0000-upper"


class RestPage(HttpPage):
    """One connection to the REST port."""

    most: ClassVar[int] = 256
    content_type: ClassVar[str] = JSON

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._login: asyncio.Task[None] | None = None
        self._sent: bytes | None = None  # the last map of a streaming page
        self._look: asyncio.TimerHandle | None = None

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._login is not None:
            self._login.cancel()
        if self._look is not None:
            self._look.cancel()

    # ── Logins ──────────────────────────────────────────────────────────────────────────────────

    def answer(self, request: HttpRequest) -> None:
        if self._node.users is None:
            self._show(request, "")
        else:
            self._login = self._node.loop.create_task(self._authenticate(request))

    async def _authenticate(self, request: HttpRequest) -> None:
        node, transport = self._node, self.transport
        host = (transport.get_extra_info("peername") or ("",))[0]
        if transport.get_extra_info("sslcontext") is None and not is_loopback(host):
            self.send(403, _error("a password would be sent unencrypted; start the node with TLS"))
            return
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        try:
            if scheme.lower() != "basic":
                raise AuthenticationFailed("log in with a user and a password (Basic)")
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
            assert node.users is not None
            user = await node.passwords.check(node.users, host, name, password)
        except (AuthenticationFailed, binascii.Error, UnicodeDecodeError):
            if scheme:
                node.counters.failed_logins += 1
            wanted = 'WWW-Authenticate: Basic realm="upper"'
            self.send(401, _error("the user name or the password is wrong or missing"), headers=(wanted,))
        except Busy as error:
            self.send(503, _error(str(error)))
        else:
            self._show(request, user.name)

    # ── Pages ─────────────────────────────────────────────────────────────────────────────────────

    def _show(self, request: HttpRequest, user: str) -> None:
        path = request.path.rstrip("/")
        if path == "/whoami":
            self._send_json({"id": user, "domain": "local"})
        elif path == "/pools":
            self._send_json(self._pools())
        elif path in PAGES:
            self._when_durable(lambda cluster: self._send_json(PAGES[path](cluster)))
        else:
            folder, _, name = path.rpartition("/")
            make, stream = OF_BUCKET.get(folder, (None, False))
            if make is None:
                known = (*FIXED, *(f"{each}/BUCKET" for each in OF_BUCKET))
                self.send(404, _error(f"there are {', '.join(known)}"))
            elif unquote(name) != self._node.bucket.name:
                self.send(404, _error(f"there is no such bucket; this node has {self._node.bucket.name}"))
            elif stream:
                self.remove_time_limit()
                self.begin(200, JSON, "Transfer-Encoding: chunked")
                self._stream(make)
            else:
                self._when_durable(lambda cluster: self._send_json(make(cluster)))

    def _send_json(self, content: object) -> None:
        self.send(200, _text(content))

    def _pools(self) -> dict[str, object]:
        uuid = f"{self._node.bucket.uuid:032x}"
        pool = {"name": "default", "uri": f"/pools/default?uuid={uuid}", "streamingUri": ""}
        return {"implementationVersion": COMPATIBLE, "isAdminCreds": False, "uuid": uuid, "pools": [pool]}

    # ── The map ───────────────────────────────────────────────────────────────────────────────────

    def _when_durable(self, then: Callable[[RestContent], None]) -> None:
        """Call `then` with the map, when it may be shown."""
        node = self._node
        shown = RestContent(node.cluster_map(), node.map.alive() if node.map else (), self._host)

        def show() -> None:
            if not self.transport.is_closing():
                then(shown)

        if node.replication is not None or node.due <= node.committed:
            show()
        else:
            node.bucket.start_large_batch()
            node.fanout.after(node.due, show)

    @property
    def _host(self) -> str:
        """The host at which the client has reached the node."""
        address = self.transport.get_extra_info("sockname")
        host = address[0] if address else "127.0.0.1"
        return f"[{host}]" if ":" in host else str(host)

    def _stream(self, make: Callable[[RestContent], object]) -> None:
        content = self._node.cluster_map()
        if content != self._sent:
            self._sent = content
            self._when_durable(lambda shown: self._chunk(_text(make(shown)) + BETWEEN))
        self._look = self._node.loop.call_later(LOOK, self._stream, make)

    def _chunk(self, data: bytes) -> None:
        if self.transport.get_write_buffer_size() > len(data):
            self.transport.abort()  # it has not read the map before
        else:
            self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


class RestContent:
    """The map of the bucket as the pages show it."""

    def __init__(self, content: bytes, alive: tuple[bool, ...], host: str) -> None:
        self.map: dict[str, Any] = json.loads(content.replace(ANY_HOST.encode(), host.encode()))
        self._alive, self._host = alive, host

    def terse(self) -> dict[str, Any]:
        return self.map

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes, with the condition of each."""
        found = []
        described = zip(self.map["nodes"], self.map["nodesExt"], strict=True)
        for number, (node, services) in enumerate(described):
            host = node["hostname"].rpartition(":")[0]
            alive = number >= len(self._alive) or self._alive[number]
            found.append(
                {
                    "hostname": f"{host}:{services['services']['mgmt']}",
                    "status": "healthy" if alive else "unhealthy",
                    "clusterMembership": "active",
                    "version": COMPATIBLE,
                    "clusterCompatibility": 6 * 0x10000 + 6,
                    "ports": node["ports"],
                    "services": ["kv"],
                    "thisNode": bool(services.get("thisNode")),
                }
            )
        return found

    def bucket(self) -> dict[str, Any]:
        name = quote(self.map["name"], safe="")
        return {
            "name": self.map["name"],
            "uuid": self.map["uuid"],
            "bucketType": "membase",
            "storageBackend": "couchstore",
            "authType": "sasl",
            "uri": f"/pools/default/buckets/{name}",
            "streamingUri": f"/pools/default/bucketsStreaming/{name}",
            "nodeLocator": self.map["nodeLocator"],
            "replicaNumber": self.map["vBucketServerMap"]["numReplicas"],
            "bucketCapabilitiesVer": self.map["bucketCapabilitiesVer"],
            "bucketCapabilities": self.map["bucketCapabilities"],
            "nodes": self.nodes(),
            "vBucketServerMap": self.map["vBucketServerMap"],
        }

    def pool(self) -> dict[str, Any]:
        return {
            "name": "default",
            "nodes": self.nodes(),
            "buckets": {
                "uri": "/pools/default/buckets",
                "terseBucketsBase": "/pools/default/b/",
                "terseStreamingBucketsBase": "/pools/default/bs/",
            },
        }

    def node_services(self) -> dict[str, Any]:
        return {"rev": self.map["rev"], "revEpoch": self.map["revEpoch"], "nodesExt": self.map["nodesExt"]}


PAGES: Mapping[str, Callable[[RestContent], object]] = {
    "/pools/default": RestContent.pool,
    "/pools/default/buckets": lambda shown: [shown.bucket()],
    "/pools/default/nodeServices": RestContent.node_services,
}
OF_BUCKET: Mapping[str, tuple[Callable[[RestContent], object], bool]] = {
    "/pools/default/buckets": (RestContent.bucket, False),
    "/pools/default/bucketsStreaming": (RestContent.bucket, True),
    "/pools/default/b": (RestContent.terse, False),
    "/pools/default/bs": (RestContent.terse, True),
}
FIXED = ("/whoami", "/pools", *PAGES)


def _text(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _error(sentence: str) -> bytes:
    return _text({"errors": sentence})
