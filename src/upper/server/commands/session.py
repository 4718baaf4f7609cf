"""Commands about the connection and the node: HELLO, SASL, the bucket, the map and the error map."""

from __future__ import annotations

import json
import logging
import secrets

from upper.errors import (
    AuthenticationFailed,
    Busy,
    InvalidArguments,
    KeyNotFound,
    NotAllowed,
    NotSupported,
    UnknownCollection,
    UnknownScope,
)
from upper.server.auth import HASHES, MECHANISMS, SYNONYMS, Challenge, Scram, Welcome, plain_credentials
from upper.server.connection import Connection
from upper.server.table import Call, Reply, handles
from upper.version import VERSION
from upper.wire.codes import Feature, Opcode, Status

log = logging.getLogger(__name__)

MAX_FEATURES = 1024  # bytes

# What HELLO may negotiate. Compressed values are not included: values are stored as they arrive.
FEATURES = frozenset(
    {
        Feature.TCP_NODELAY,
        Feature.MUTATION_SEQNO,
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.JSON,
        Feature.ALT_REQUEST,
        Feature.SYNC_REPLICATION,
        Feature.PRESERVE_EXPIRY,
    }
)


@handles(Opcode.NOOP, before_login=True)
def noop(call: Call) -> Reply:
    return Reply()


@handles(Opcode.VERSION, before_login=True)
def version(call: Call) -> Reply:
    return Reply(value=VERSION.encode())


@handles(Opcode.VERBOSITY, before_login=True)
def verbosity(call: Call) -> Reply:
    # Accepted because clients send it, and without effect: the operator chooses what is logged.
    return Reply()


@handles(Opcode.QUIT, quiet=(Opcode.QUITQ,), before_login=True)
def leave(call: Call) -> Reply:
    call.connection.close_when_answered()
    return Reply()


@handles(Opcode.HELLO, before_login=True)
def hello(call: Call) -> Reply:
    """Agree on features: the answer lists those of the request that the node supports."""
    if len(call.value) % 2 or len(call.value) > MAX_FEATURES:
        raise InvalidArguments(f"the features of HELLO are two bytes each, {MAX_FEATURES} in all at most")
    asked = [int.from_bytes(call.value[at : at + 2], "big") for at in range(0, len(call.value), 2)]
    agreed = list(dict.fromkeys(feature for feature in asked if feature in FEATURES))
    call.connection.agree(call.key.decode(errors="replace"), frozenset(agreed))
    return Reply(value=b"".join(feature.to_bytes(2, "big") for feature in agreed))


# ── SASL ──────────────────────────────────────────────────────────────────────────────────────────


@handles(Opcode.SASL_LIST_MECHS, before_login=True)
def mechanisms(call: Call) -> Reply:
    if call.node.users is None:
        return Reply(value=b"PLAIN")  # any name and any password are accepted
    offered = [name for name in MECHANISMS if name != "PLAIN" or call.connection.private]
    return Reply(value=" ".join(offered).encode())


@handles(Opcode.SASL_AUTH, before_login=True)
async def authenticate(call: Call) -> Reply:
    connection, name = call.connection, call.key.decode(errors="replace")
    mechanism = SYNONYMS.get(name, name)
    connection.logout()
    connection.scram = None
    if mechanism == "PLAIN":
        return await _plain(call)
    if mechanism not in HASHES:
        raise NotSupported(f"there is no mechanism {mechanism!r} here; use one of {', '.join(MECHANISMS)}")
    if call.node.users is None:
        raise NotSupported("this node has no users: every client may do everything without a login")
    connection.scram = Scram(mechanism, call.node.users, nonce=secrets.token_urlsafe(18))
    return _scram_step(call)


@handles(Opcode.SASL_STEP, before_login=True)
def step(call: Call) -> Reply:
    if call.connection.scram is None:
        raise AuthenticationFailed("there is no exchange to continue; begin with SASL_AUTH")
    return _scram_step(call)


async def _plain(call: Call) -> Reply:
    if not call.connection.private:
        raise NotAllowed("PLAIN shows the password to the network; use SCRAM-SHA-512, or TLS")
    name, password = plain_credentials(call.value)
    users = call.node.users
    if users is None:
        return Reply(value=b"Authenticated")  # without users every client may do everything
    try:
        user = await call.node.passwords.check(users, call.connection.host, name, password)
    except AuthenticationFailed:
        _note_failure(call.connection)
        raise
    call.connection.login(user)
    return Reply(value=b"Authenticated")


def _scram_step(call: Call) -> Reply:
    exchange, connection = call.connection.scram, call.connection
    assert exchange is not None
    throttle, host = connection.node.throttle, connection.host
    try:
        answer = exchange.step(call.value, allow=lambda name: throttle.check(host, name))
    except Busy:
        connection.scram = None
        raise
    except AuthenticationFailed:
        connection.scram = None
        throttle.failed(host, exchange.name)
        _note_failure(connection)
        raise
    match answer:
        case Challenge(data):
            return Reply(Status.AUTHENTICATION_CONTINUES, value=data)
        case Welcome(user, data):
            connection.scram = None
            throttle.succeeded(host, user.name)
            connection.login(user)
            return Reply(value=data)


def _note_failure(connection: Connection) -> None:
    node = connection.node
    node.counters.failed_logins += 1
    connection.failed_logins += 1
    log.warning("%s: login failed, attempt %d on this connection", connection.peer, connection.failed_logins)
    if connection.failed_logins >= node.settings.limits.failed_logins:
        connection.close_when_answered()


# ── The bucket and the map ────────────────────────────────────────────────────────────────────────


@handles(Opcode.SELECT_BUCKET)
def select_bucket(call: Call) -> Reply:
    if call.key.decode(errors="replace") != call.bucket.name:
        raise KeyNotFound(f"there is no such bucket here; this node holds {call.bucket.name!r}")
    return Reply()


@handles(Opcode.GET_CLUSTER_CONFIG, waits=True)
def cluster_config(call: Call) -> Reply:
    return Reply(value=call.node.cluster_map(), data_type=_json(call))


@handles(Opcode.GET_ERROR_MAP, before_login=True)
def error_map(call: Call) -> Reply:
    if len(call.value) not in (0, 2):
        raise InvalidArguments("an error map is requested with its version, in two bytes")
    return Reply(value=ERROR_MAP, data_type=_json(call))


# ── Collections ───────────────────────────────────────────────────────────────────────────────────

_DEFAULT = {"name": "_default", "uid": "0"}
MANIFEST = json.dumps({"uid": "0", "scopes": [_DEFAULT | {"collections": [_DEFAULT]}]}).encode()


@handles(Opcode.GET_COLLECTIONS_MANIFEST)
def manifest(call: Call) -> Reply:
    """The default collection of the default scope, and no other."""
    return Reply(value=MANIFEST, data_type=_json(call))


@handles(Opcode.GET_COLLECTION_ID)
def collection_id(call: Call) -> Reply:
    """The number of a collection, for clients that ask although collections were not agreed on."""
    asked = (call.value or call.key).decode(errors="replace")
    scope, _, collection = asked.partition(".")
    if scope not in ("", "_default"):
        raise UnknownScope(f"there is no scope {scope[:80]!r}; the default scope is the only one")
    if collection not in ("", "_default"):
        raise UnknownCollection(
            f"there is no collection {asked[:80]!r}; the default collection is the only one"
        )
    return Reply(extras=bytes(12))  # the manifest's number in 8 bytes, the collection's in 4


def _json(call: Call) -> int:
    return 1 if Feature.JSON in call.connection.features else 0


def _errors() -> bytes:
    """The meaning of each status for clients, in the form that Couchbase clients read."""
    rows: dict[int, tuple[str, str, list[str]]] = {
        Status.OK: ("SUCCESS", "success", ["success"]),
        Status.KEY_NOT_FOUND: ("KEY_ENOENT", "the key does not exist", ["item-only"]),
        Status.KEY_EXISTS: ("KEY_EEXISTS", "the key exists, or its CAS differs", ["item-only"]),
        Status.VALUE_TOO_LARGE: ("E2BIG", "the value is too large", ["item-only", "invalid-input"]),
        Status.INVALID_ARGUMENTS: ("EINVAL", "the request is malformed", ["invalid-input"]),
        Status.NOT_STORED: ("NOT_STORED", "the item was not stored", ["item-only"]),
        Status.NOT_A_NUMBER: ("DELTA_BADVAL", "the value is not a number", ["item-only"]),
        Status.NOT_MY_VBUCKET: (
            "NOT_MY_VBUCKET",
            "the partition is on another node",
            ["fetch-config", "invalid-input"],
        ),
        Status.NO_BUCKET: ("NO_BUCKET", "no bucket is selected", ["conn-state-invalidated"]),
        Status.LOCKED: ("LOCKED", "the item is locked", ["item-locked", "item-only", "retry-later"]),
        Status.AUTHENTICATION_FAILED: ("AUTH_ERROR", "the login failed", ["conn-state-invalidated", "auth"]),
        Status.AUTHENTICATION_CONTINUES: ("AUTH_CONTINUE", "the login continues", ["special-handling"]),
        Status.OUT_OF_RANGE: ("ERANGE", "a number is out of range", ["invalid-input"]),
        Status.ROLLBACK: ("ROLLBACK", "the stream must begin earlier", ["special-handling"]),
        Status.NO_ACCESS: ("EACCESS", "the user lacks a role", ["support", "auth"]),
        Status.UNKNOWN_COMMAND: ("UNKNOWN_COMMAND", "there is no such command", ["support"]),
        Status.OUT_OF_MEMORY: ("ENOMEM", "there is no memory left", ["temp", "retry-now"]),
        Status.NOT_SUPPORTED: ("NOT_SUPPORTED", "this is not supported here", ["support"]),
        Status.INTERNAL_ERROR: ("EINTERNAL", "the node has an internal error", ["internal"]),
        Status.BUSY: ("EBUSY", "the node is busy", ["temp", "retry-later"]),
        Status.TEMPORARY_FAILURE: ("ETMPFAIL", "try again", ["temp", "retry-later"]),
        Status.UNKNOWN_COLLECTION: ("UNKNOWN_COLLECTION", "there is no such collection", ["item-only"]),
        Status.UNKNOWN_SCOPE: ("UNKNOWN_SCOPE", "there is no such scope", ["item-only"]),
        Status.UNKNOWN_STREAM_ID: ("DCP_STREAMID_INVALID", "stream ids are not enabled", ["dcp"]),
        Status.DURABILITY_INVALID_LEVEL: (
            "DURABILITY_INVALID_LEVEL",
            "there is no such durability level",
            ["item-only", "invalid-input"],
        ),
        Status.DURABILITY_IMPOSSIBLE: (
            "DURABILITY_IMPOSSIBLE",
            "too few copies are in sync",
            ["item-only", "fetch-config"],
        ),
        Status.SYNC_WRITE_AMBIGUOUS: (
            "SYNC_WRITE_AMBIGUOUS",
            "too few copies confirmed the write in time",
            ["item-only"],
        ),
        **{
            status: (f"SUBDOC_{name}", sentence, ["subdoc", "item-only"])
            for status, name, sentence in (
                (Status.PATH_NOT_FOUND, "PATH_ENOENT", "the path does not exist"),
                (Status.PATH_MISMATCH, "PATH_MISMATCH", "the path does not fit the document"),
                (Status.PATH_INVALID, "PATH_EINVAL", "the path is invalid"),
                (Status.PATH_TOO_DEEP, "PATH_E2BIG", "the path is too long"),
                (Status.DOCUMENT_TOO_DEEP, "DOC_ETOODEEP", "the document is nested too deeply"),
                (Status.VALUE_CANNOT_BE_INSERTED, "VALUE_CANTINSERT", "the value cannot be inserted"),
                (Status.DOCUMENT_NOT_JSON, "DOC_NOTJSON", "the document is not JSON"),
                (Status.NUMBER_OUT_OF_RANGE, "NUM_ERANGE", "the number is out of range"),
                (Status.DELTA_INVALID, "DELTA_EINVAL", "the delta is invalid"),
                (Status.PATH_EXISTS, "PATH_EEXISTS", "the path exists already"),
                (Status.SUBDOC_INVALID_COMBINATION, "INVALID_COMBO", "the paths cannot be combined"),
                (Status.SUBDOC_PATHS_FAILED, "MULTI_PATH_FAILURE", "some paths failed"),
            )
        },
    }
    errors = {
        f"{status:x}": {"name": name, "desc": words, "attrs": attributes}
        for status, (name, words, attributes) in rows.items()
    }
    return json.dumps({"version": 1, "revision": 1, "errors": errors}).encode()


ERROR_MAP = _errors()
