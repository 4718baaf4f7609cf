"""Commands about the connection and the node itself: who is there, what both sides know, where things are."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets

from upper.errors import AuthenticationFailed, InvalidArguments, KeyNotFound, NotAllowed, NotSupported
from upper.server.auth import HASHES, MECHANISMS, Challenge, Scram, Welcome, plain_credentials
from upper.server.connection import Connection
from upper.server.table import Call, Reply, handles
from upper.version import VERSION
from upper.wire.codes import Feature, Opcode, Status

log = logging.getLogger(__name__)

MAX_FEATURES = 1024  # bytes

# What HELLO may settle here. Data types beyond raw bytes are not among it: values are kept as they come.
FEATURES = frozenset(
    {
        Feature.TCP_NODELAY,
        Feature.MUTATION_SEQNO,
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.JSON,
    }
)


@handles(Opcode.NOOP, anybody=True)
def noop(call: Call) -> Reply:
    return Reply()


@handles(Opcode.VERSION, anybody=True)
def version(call: Call) -> Reply:
    return Reply(value=VERSION.encode())


@handles(Opcode.VERBOSITY, extras=(4,), anybody=True)
def verbosity(call: Call) -> Reply:
    # Accepted because clients send it; what is logged is the operator's business.
    return Reply()


@handles(Opcode.QUIT, quiet=(Opcode.QUITQ,), anybody=True)
def leave(call: Call) -> Reply:
    call.connection.close_when_answered()
    return Reply()


@handles(Opcode.HELLO, key=None, value=None, anybody=True)
def hello(call: Call) -> Reply:
    """The client says what it knows; the answer is what both know."""
    if len(call.value) % 2 or len(call.value) > MAX_FEATURES:
        raise InvalidArguments(f"the features of HELLO are two bytes each, {MAX_FEATURES} in all at most")
    asked = [int.from_bytes(call.value[at : at + 2], "big") for at in range(0, len(call.value), 2)]
    agreed = list(dict.fromkeys(feature for feature in asked if feature in FEATURES))
    call.connection.agree(call.key.decode(errors="replace"), frozenset(agreed))
    return Reply(value=b"".join(feature.to_bytes(2, "big") for feature in agreed))


# ── SASL ──────────────────────────────────────────────────────────────────────────────────────────


@handles(Opcode.SASL_LIST_MECHS, anybody=True)
def mechanisms(call: Call) -> Reply:
    if call.node.users is None:
        return Reply(value=b"PLAIN")  # any name and any password will do
    offered = [name for name in MECHANISMS if name != "PLAIN" or call.connection.private]
    return Reply(value=" ".join(offered).encode())


@handles(Opcode.SASL_AUTH, key=True, value=None, anybody=True)
async def authenticate(call: Call) -> Reply:
    connection, mechanism = call.connection, call.key.decode(errors="replace")
    connection.logout()
    connection.scram = None
    call.node.throttle.check(connection.host)
    if mechanism == "PLAIN":
        return await _plain(call)
    if mechanism not in HASHES:
        raise NotSupported(f"there is no mechanism {mechanism!r} here; use one of {', '.join(MECHANISMS)}")
    if call.node.users is None:
        raise NotSupported("this node has no users: everybody may do everything, without a login")
    connection.scram = Scram(mechanism, call.node.users, nonce=secrets.token_urlsafe(18))
    return _scram_step(call)


@handles(Opcode.SASL_STEP, key=True, value=None, anybody=True)
def step(call: Call) -> Reply:
    if call.connection.scram is None:
        raise AuthenticationFailed("there is no exchange to go on with; begin with SASL_AUTH")
    return _scram_step(call)


async def _plain(call: Call) -> Reply:
    if not call.connection.private:
        raise NotAllowed("PLAIN shows the password to the network; use SCRAM-SHA-512, or TLS")
    name, password = plain_credentials(call.value)
    users = call.node.users
    if users is None:
        return Reply(value=b"Authenticated")  # everybody may do everything: there is nothing to prove
    try:
        # Checking is slow on purpose; in a thread it is slow for this peer alone.
        user = await asyncio.get_running_loop().run_in_executor(
            call.node.verifier, users.check, name, password
        )
    except AuthenticationFailed:
        _note_failure(call.connection)
        raise
    call.connection.login(user)
    return Reply(value=b"Authenticated")


def _scram_step(call: Call) -> Reply:
    exchange, connection = call.connection.scram, call.connection
    assert exchange is not None
    try:
        answer = exchange.step(call.value)
    except AuthenticationFailed:
        connection.scram = None
        _note_failure(connection)
        raise
    match answer:
        case Challenge(data):
            return Reply(Status.AUTHENTICATION_CONTINUES, value=data)
        case Welcome(user, data):
            connection.scram = None
            connection.login(user)
            return Reply(value=data)


def _note_failure(connection: Connection) -> None:
    node = connection.node
    node.counters.failed_logins += 1
    node.throttle.failed(connection.host)
    connection.failed_logins += 1
    log.warning("%s: login failed, attempt %d on this connection", connection.peer, connection.failed_logins)
    if connection.failed_logins >= node.settings.limits.failed_logins:
        connection.close_when_answered()


# ── The bucket and the map ────────────────────────────────────────────────────────────────────────


@handles(Opcode.SELECT_BUCKET, key=True)
def select_bucket(call: Call) -> Reply:
    if call.key.decode(errors="replace") != call.bucket.name:
        raise KeyNotFound(f"there is no such bucket here; this node holds {call.bucket.name!r}")
    return Reply()


@handles(Opcode.GET_CLUSTER_CONFIG, extras=(0, 16), key=None, value=None)
def cluster_config(call: Call) -> Reply:
    return Reply(value=call.node.cluster_map(), data_type=_json(call))


@handles(Opcode.GET_ERROR_MAP, value=None, anybody=True)
def error_map(call: Call) -> Reply:
    if len(call.value) not in (0, 2):
        raise InvalidArguments("an error map is asked for with its version, in two bytes")
    return Reply(value=ERROR_MAP, data_type=_json(call))


def _json(call: Call) -> int:
    return 1 if Feature.JSON in call.connection.features else 0


def _errors() -> bytes:
    """What clients may conclude from each status, in the form that Couchbase clients read."""
    rows: dict[int, tuple[str, str, list[str]]] = {
        Status.OK: ("SUCCESS", "success", ["success"]),
        Status.KEY_NOT_FOUND: ("KEY_ENOENT", "the key does not exist", ["item-only"]),
        Status.KEY_EXISTS: ("KEY_EEXISTS", "the key exists, or its CAS is another", ["item-only"]),
        Status.VALUE_TOO_LARGE: ("E2BIG", "the value is too large", ["item-only", "invalid-input"]),
        Status.INVALID_ARGUMENTS: ("EINVAL", "the request is malformed", ["invalid-input"]),
        Status.NOT_STORED: ("NOT_STORED", "the item was not stored", ["item-only"]),
        Status.NOT_A_NUMBER: ("DELTA_BADVAL", "the value is not a number", ["item-only"]),
        Status.NOT_MY_VBUCKET: (
            "NOT_MY_VBUCKET",
            "the partition is elsewhere",
            ["fetch-config", "invalid-input"],
        ),
        Status.NO_BUCKET: ("NO_BUCKET", "no bucket is selected", ["conn-state-invalidated"]),
        Status.LOCKED: ("LOCKED", "the item is locked", ["item-locked", "item-only", "retry-later"]),
        Status.AUTHENTICATION_FAILED: ("AUTH_ERROR", "the login failed", ["conn-state-invalidated", "auth"]),
        Status.AUTHENTICATION_CONTINUES: ("AUTH_CONTINUE", "the login goes on", ["special-handling"]),
        Status.OUT_OF_RANGE: ("ERANGE", "a number is out of range", ["invalid-input"]),
        Status.ROLLBACK: ("ROLLBACK", "the stream must begin earlier", ["special-handling"]),
        Status.NO_ACCESS: ("EACCESS", "the user lacks a role", ["support", "auth"]),
        Status.UNKNOWN_COMMAND: ("UNKNOWN_COMMAND", "there is no such command", ["support"]),
        Status.OUT_OF_MEMORY: ("ENOMEM", "there is no memory left", ["temp", "retry-now"]),
        Status.NOT_SUPPORTED: ("NOT_SUPPORTED", "this is not supported here", ["support"]),
        Status.INTERNAL_ERROR: ("EINTERNAL", "something is broken in the node", ["internal"]),
        Status.BUSY: ("EBUSY", "the node is busy", ["temp", "retry-later"]),
        Status.TEMPORARY_FAILURE: ("ETMPFAIL", "try again", ["temp", "retry-later"]),
    }
    errors = {
        f"{status:x}": {"name": name, "desc": words, "attrs": attributes}
        for status, (name, words, attributes) in rows.items()
    }
    return json.dumps({"version": 1, "revision": 1, "errors": errors}).encode()


ERROR_MAP = _errors()
