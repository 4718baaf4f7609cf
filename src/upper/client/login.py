"""The first packets of a connection: HELLO, signing in, and choosing the bucket. No I/O.

`login` is a generator: it yields a packet to send and receives the response to it. The strongest mechanism
that the node offers is used; PLAIN, which sends the password, only over TLS or to this machine. With SCRAM
the node proves in turn that it has the password, or the connection is not used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Callable, Generator

from upper.client.link import Answer, Purpose
from upper.client.refusals import refusal
from upper.errors import AuthenticationFailed, Refused
from upper.wire.codes import Feature, Opcode, Status
from upper.wire.packet import REQUEST, pack

# The names of RFC 5802 and 7677, and those of Couchbase.
HASHES = {
    "SCRAM-SHA-512": "sha512",
    "SCRAM-SHA512": "sha512",
    "SCRAM-SHA-256": "sha256",
    "SCRAM-SHA256": "sha256",
    "SCRAM-SHA-1": "sha1",
    "SCRAM-SHA1": "sha1",
}
MIN_ITERATIONS = 4096  # RFC 7677; fewer would make guessing the password from the exchange cheap
MAX_ITERATIONS = 10_000_000  # more would cost too much CPU time

Login = Generator[bytes, Answer, None]


def login(
    *,
    user: str | None,
    password: str | None,
    bucket: str,
    private: bool,
    nonce: Callable[[], str],
    name: str = "upper",
    purpose: Purpose = Purpose.REQUESTS,
) -> Login:
    """The packets that precede the first request. `private`: the connection is encrypted or local."""
    features = struct.pack(">H", Feature.JSON)
    if purpose is Purpose.TOKENS:
        features += struct.pack(">H", Feature.MUTATION_SEQNO)
    features += struct.pack(">HHH", Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET)
    hello = yield pack(REQUEST, Opcode.HELLO, key=name.encode(), value=features)
    # A node without HELLO is usable: its responses to writes carry no seqno.
    if hello.status not in (Status.OK, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
        raise refusal(hello)
    if user is not None:
        yield from _sign_in(user, password or "", private=private, nonce=nonce)
    if hello.status != Status.OK or _granted(hello, Feature.SELECT_BUCKET):
        yield from _select(bucket, user)
    elif bucket != (user or "default"):
        raise Refused(
            f"this server, older than Couchbase 5.0, takes the bucket from the login; log in as {bucket!r}"
        )
    if purpose is Purpose.LOGS:
        from upper.model.messages import Open
        from upper.wire.dcp import DCP  # the tables of the dialects are loaded where they are needed

        opened = yield DCP.encode(Open(name=f"{name}-{nonce()}".encode()))
        if opened.status:
            raise refusal(opened)


def _granted(hello: Answer, feature: Feature) -> bool:
    """Whether a node has agreed to a feature. Servers before 5.0 bind the bucket to the user instead."""
    code = feature.to_bytes(2, "big")
    return any(hello.value[at : at + 2] == code for at in range(0, len(hello.value), 2))


def _select(bucket: str, user: str | None) -> Login:
    chosen = yield pack(REQUEST, Opcode.SELECT_BUCKET, key=bucket.encode())
    if chosen.status == Status.KEY_NOT_FOUND:
        raise Refused(f"there is no bucket {bucket!r} here; check the end of the URL")
    if chosen.status == Status.AUTHENTICATION_FAILED and user is None:
        raise AuthenticationFailed(
            "the node requires a user; write upr://USER@HOST:PORT/BUCKET, and give the password in "
            "UPPER_PASSWORD or in a file"
        )
    if chosen.status not in (Status.OK, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
        raise refusal(chosen)


def _sign_in(user: str, password: str, *, private: bool, nonce: Callable[[], str]) -> Login:
    offer = yield pack(REQUEST, Opcode.SASL_LIST_MECHS)
    if offer.status in (Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
        return  # a node without users requires no login
    if offer.status:
        raise refusal(offer)
    offered = offer.value.decode(errors="replace").split()
    for mechanism, hash_name in HASHES.items():
        if mechanism in offered:
            yield from _scram(mechanism, hash_name, user, password, nonce=nonce())
            return
    if "PLAIN" not in offered:
        raise AuthenticationFailed(
            f"the node offers {', '.join(offered) or 'no mechanism'} to log in, which is not supported here"
        )
    if not private:
        raise AuthenticationFailed(
            "the node offers only PLAIN, which would send the password unencrypted; add ?tls=on to the URL"
        )
    answer = yield pack(
        REQUEST, Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0" + user.encode() + b"\0" + password.encode()
    )
    if answer.status:
        raise _denied(answer)


def _scram(mechanism: str, hash_name: str, user: str, password: str, *, nonce: str) -> Login:
    """RFC 5802, the client's side."""
    bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    first = yield pack(REQUEST, Opcode.SASL_AUTH, key=mechanism.encode(), value=f"n,,{bare}".encode())
    if first.status != Status.AUTHENTICATION_CONTINUES:
        raise _denied(first)
    try:
        challenge = first.value.decode()
        fields = dict(part.split("=", 1) for part in challenge.split(","))
        salt, iterations = base64.b64decode(fields["s"], validate=True), int(fields["i"])
        if not fields["r"].startswith(nonce) or not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise ValueError
    except (ValueError, KeyError):
        raise AuthenticationFailed(
            "the node's part of the login is invalid; do not trust this node"
        ) from None
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    without_proof = f"c=biws,r={fields['r']}"
    auth_message = f"{bare},{challenge},{without_proof}".encode()
    signature = hmac.digest(hashlib.new(hash_name, client_key).digest(), auth_message, hash_name)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
    last = yield pack(
        REQUEST, Opcode.SASL_STEP, key=mechanism.encode(), value=f"{without_proof},p={proof}".encode()
    )
    if last.status:
        raise _denied(last)
    expected = hmac.digest(hmac.digest(salted, b"Server Key", hash_name), auth_message, hash_name)
    if not hmac.compare_digest(last.value, b"v=" + base64.b64encode(expected)):
        raise AuthenticationFailed(
            "the node could not prove that it has the password; do not trust this node"
        )


def _denied(answer: Answer) -> Refused:
    if answer.status != Status.AUTHENTICATION_FAILED:
        return refusal(answer)
    return AuthenticationFailed(
        "the user name or the password is wrong; check USER in USER@HOST:PORT of the URL, and the password "
        "in UPPER_PASSWORD or in its file"
    )
