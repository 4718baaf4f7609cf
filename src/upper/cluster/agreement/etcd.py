"""The agreement store over etcd v3, through its JSON gateway, with the standard library alone.

The gateway ignores unknown fields, so a misspelt comparison would make a transaction unconditional: every
request is built in this module, and the tests show that a failing comparison fails. It omits false booleans
and zero numbers, sends 64-bit numbers as text, and answers a keep-alive of an ended lease without a TTL.

A call is sent to one endpoint at a time, the last good one first. Reads, grants and renewals are repeated
on the next endpoint. A write whose connection broke may have taken effect, so it is not repeated: it raises
`Unavailable`.
"""

from __future__ import annotations

import json
import math
import socket
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NoReturn

from upper.cluster.agreement import ABSENT, LeaseId, Unavailable, Versioned
from upper.errors import ClusterError

Message = dict[str, Any]
UNAUTHENTICATED = 16  # gRPC's code: the token has ended
BUSY = 429  # too many requests, or no space left: an administrator can end both
OLD_TOKEN = "revision of auth store is old"
REMEDIES = (
    ("user name is empty", "; give --etcd-user NAME and --etcd-password-file FILE"),
    ("permission denied", "; give --etcd-user a user who may use the keys below /upper/NAME/"),
    ("invalid user ID or password", "; check --etcd-user and its password"),
    ("CommonName of client", "; with --etcd-user, give --etcd-cert a certificate without a common name"),
    ("authentication is not enabled", "; leave out --etcd-user, or enable authentication in etcd"),
    ("request is too large", "; start etcd with a larger --max-request-bytes"),
)


class EtcdStore:
    """`AgreementStore` in an etcd cluster; all keys lie below `root`."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        root: str,
        *,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        timeout: float = 2.0,
    ) -> None:
        if not endpoints:
            raise ValueError("an etcd store needs an endpoint")
        self._endpoints = list(endpoints)
        self._root = f"/upper/{root}/"
        self._tls = tls
        self._login = (user, password)
        self._timeout = timeout
        self._token = ""
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._watching: set[HTTPConnection] = set()
        self._closed = False

    # ── The interface ─────────────────────────────────────────────────────────────────────────────

    def read(self, prefix: str) -> tuple[dict[str, Versioned], int]:
        first = self._root + prefix
        answer = self._call("/v3/kv/range", {"key": _text(first), "range_end": _text(_after(first))})
        found = {
            _plain(item["key"]).decode()[len(self._root) :]: Versioned(
                _plain(item.get("value", "")), int(item["mod_revision"])
            )
            for item in answer.get("kvs", [])
        }
        return found, int(answer["header"]["revision"])

    def put_if(self, key: str, value: bytes, *, revision: int, lease: LeaseId | None = None) -> int | None:
        name = _text(self._root + key)
        put: Message = {"key": name, "value": b64encode(value).decode()}
        if lease is not None:
            put["lease"] = str(lease)
        answer = self._transaction(name, revision, {"requestPut": put})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    def delete_if(self, key: str, *, revision: int) -> bool:
        if revision == ABSENT:
            return False
        name = _text(self._root + key)
        answer = self._transaction(name, revision, {"requestDeleteRange": {"key": name}})
        return bool(answer.get("succeeded"))

    def grant(self, seconds: float) -> LeaseId:
        # etcd counts whole seconds; a lease must not be shorter than asked.
        answer = self._call("/v3/lease/grant", {"TTL": str(math.ceil(seconds))})
        return LeaseId(int(answer["ID"]))

    def renew(self, lease: LeaseId) -> bool:
        answer = self._call("/v3/lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: LeaseId) -> None:
        try:
            self._call("/v3/lease/revoke", {"ID": str(lease)}, repeat=False)
        except ClusterError as error:
            if "not found" not in str(error):
                raise

    def wait(self, prefix: str, *, after: int, seconds: float) -> bool:
        first = self._root + prefix
        create = {"key": _text(first), "range_end": _text(_after(first)), "start_revision": str(after + 1)}
        ends = time.monotonic() + seconds
        connection = self._connect(self._endpoints[0], timeout=max(0.01, seconds))
        with self._lock:
            if self._closed:
                raise ClusterError("the agreement store is closed")
            self._watching.add(connection)
        try:
            response = self._send(connection, "/v3/watch", {"create_request": create})
            while time.monotonic() < ends:
                if connection.sock is not None:
                    connection.sock.settimeout(max(0.01, ends - time.monotonic()))
                line = response.readline()
                if not line:
                    raise HTTPException("etcd ended the watch")
                result = _result(line)
                # Cancelled: the history since `after` is gone. Either way the caller reads again.
                if result.get("events") or result.get("canceled"):
                    return True
            return False
        except TimeoutError:
            return False
        except (OSError, HTTPException, ValueError) as error:
            self._next_endpoint()
            raise Unavailable(f"etcd ended a watch: {error}") from error
        finally:
            with self._lock:
                self._watching.discard(connection)
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._watching:
                # Closing would wait for the thread that reads; shutting the socket down ends its read.
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
            self._drop()

    # ── Requests ──────────────────────────────────────────────────────────────────────────────────

    def _transaction(self, name: str, revision: int, success: Message) -> Message:
        """One operation, if a key has a revision. The only place where comparisons are built."""
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        return self._call("/v3/kv/txn", {"compare": [compare], "success": [success]}, repeat=False)

    def _call(self, path: str, message: Message, *, repeat: bool = True) -> Message:
        with self._lock:
            if self._closed:
                raise ClusterError("the agreement store is closed")
            problem: Exception | None = None
            # etcd may have closed a connection that was idle, which is no reason to give up on it.
            attempts = len(self._endpoints) + (self._connection is not None and repeat)
            for _ in range(attempts):
                sent = False
                try:
                    connection = self._connected()
                    sent = True
                    return self._exchange(connection, path, message)
                except (OSError, HTTPException, ValueError) as error:
                    problem = error
                    self._drop()
                    self._next_endpoint()
                if sent and not repeat:
                    break
            raise Unavailable(f"etcd does not answer at {self._names()}: {problem}") from problem

    def _connected(self) -> HTTPConnection:
        """A connection to the first endpoint, logged in. Nothing of a request has been sent if this fails."""
        if self._connection is None:
            connection = self._connect(self._endpoints[0], timeout=self._timeout)
            connection.connect()
            self._connection = connection
        if self._login[0] and not self._token:
            self._authenticate(self._connection)
        return self._connection

    def _exchange(self, connection: HTTPConnection, path: str, message: Message) -> Message:
        for attempt in (1, 2):
            response = self._send(connection, path, message)
            body = _body(response)
            if response.status == 200:
                return body
            if self._login[0] and attempt == 1 and _token_ended(body):
                self._authenticate(connection)
                continue
            _refuse(response.status, body)
        raise AssertionError("the second attempt returns or raises")

    def _authenticate(self, connection: HTTPConnection) -> None:
        user, password = self._login
        self._token = ""  # etcd refuses a login that comes with a token which it has not issued
        response = self._send(connection, "/v3/auth/authenticate", {"name": user, "password": password})
        body = _body(response)
        if response.status != 200:
            _refuse(response.status, body, user)
        if not (token := body.get("token")):
            raise ClusterError(
                f"etcd gave {user!r} no token; enable authentication, or leave out --etcd-user"
            )
        self._token = str(token)

    def _send(self, connection: HTTPConnection, path: str, message: Message) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        connection.request("POST", path, json.dumps(message), headers)
        return connection.getresponse()

    def _connect(self, endpoint: tuple[str, int], *, timeout: float) -> HTTPConnection:
        host, port = endpoint
        if self._tls is not None:
            return HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        return HTTPConnection(host, port, timeout=timeout)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _next_endpoint(self) -> None:
        self._endpoints.append(self._endpoints.pop(0))

    def _names(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._endpoints)


def _body(response: HTTPResponse) -> Message:
    """The answer of etcd; the gateway's own refusals are plain text."""
    content = response.read() or b"{}"
    if response.status != 200 and not content.startswith(b"{"):
        return {"message": content.decode(errors="replace").strip()}
    return dict(json.loads(content))


def _token_ended(body: Message) -> bool:
    """Whether a new login helps: the token is unknown, or older than a change of users or roles."""
    return body.get("code") == UNAUTHENTICATED or OLD_TOKEN in str(body.get("message", ""))


def _refuse(status: int, body: Message, user: str = "") -> NoReturn:
    """Raise the error for an answer other than success: the outcome is unknown, or a retry cannot succeed."""
    message = str(body.get("message") or f"HTTP status {status}")
    if status >= 500 or status == BUSY:
        raise HTTPException(message)
    remedy = next((words for problem, words in REMEDIES if problem in message), "")
    raise ClusterError(f"etcd refused {f'the login of {user!r}' if user else 'a request'}: {message}{remedy}")


def _text(key: str) -> str:
    return b64encode(key.encode()).decode()


def _plain(text: str) -> bytes:
    return b64decode(text)


def _after(prefix: str) -> str:
    """The first key behind all that begin with `prefix`, which ends in a character below the last one."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _result(line: bytes) -> Message:
    message = json.loads(line)
    if (error := message.get("error")) is not None:  # an object in a stream, a sentence otherwise
        raise HTTPException(str(error.get("message") if isinstance(error, dict) else error))
    return dict(message.get("result", {}))
