"""The first packets of a connection: HELLO, signing in, and choosing the bucket. No I/O.

`login` is a generator: it yields a packet to send and is sent the answer to it. Of the mechanisms that a
node offers the strongest is taken; PLAIN, which shows the password, only where nobody can listen. The
node must prove in turn that it knows the password, or the connection is not used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Callable, Generator

from upper.client.link import Answer, refusal
from upper.errors import AuthenticationFailed, Refused
from upper.wire.codes import Feature, Opcode, Status
from upper.wire.packet import REQUEST, pack

HASHES = {"SCRAM-SHA-512": "sha512", "SCRAM-SHA-256": "sha256"}
MIN_ITERATIONS = 4096  # RFC 7677; a node that asks for fewer may be after the password
MAX_ITERATIONS = 10_000_000  # and one that asks for more, after our time

Login = Generator[bytes, Answer, None]


def login(
    *,
    user: str | None,
    password: str | None,
    bucket: str,
    private: bool,
    nonce: Callable[[], str],
    name: str = "upper",
    tokens: bool = False,
) -> Login:
    """Everything before the first request.

    `private`: nobody can listen on this connection. `tokens`: writes shall say where they stand in history,
    which a node does at a fraction of its full speed.
    """
    features = struct.pack(">H", Feature.MUTATION_SEQNO) if tokens else b""
    hello = yield pack(REQUEST, Opcode.HELLO, key=name.encode(), value=features)
    # A node that knows no HELLO is spoken to without: it only means that writes return no seqno.
    if hello.status not in (Status.OK, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
        raise refusal(hello)
    if user is not None:
        yield from _sign_in(user, password or "", private=private, nonce=nonce)
    chosen = yield pack(REQUEST, Opcode.SELECT_BUCKET, key=bucket.encode())
    if chosen.status == Status.KEY_NOT_FOUND:
        raise Refused(f"there is no bucket {bucket!r} here; check the end of the URL")
    if chosen.status == Status.AUTHENTICATION_FAILED and user is None:
        raise AuthenticationFailed(
            "the node lets nobody in without a name; write the URL as upr://USER:PASSWORD@HOST:PORT/BUCKET"
        )
    if chosen.status not in (Status.OK, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
        raise refusal(chosen)


def _sign_in(user: str, password: str, *, private: bool, nonce: Callable[[], str]) -> Login:
    offer = yield pack(REQUEST, Opcode.SASL_LIST_MECHS)
    if offer.status in (Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
        return  # a node without users lets everybody in
    if offer.status:
        raise refusal(offer)
    offered = offer.value.decode(errors="replace").split()
    for mechanism, hash_name in HASHES.items():
        if mechanism in offered:
            yield from _scram(mechanism, hash_name, user, password, nonce=nonce())
            return
    if "PLAIN" not in offered:
        raise AuthenticationFailed(
            f"the node offers {', '.join(offered) or 'no way to sign in'}, and none of it is known here"
        )
    if not private:
        raise AuthenticationFailed(
            "the node only offers PLAIN, which would show the password to the network; add ?tls=on to the URL"
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
        said = first.value.decode()
        fields = dict(part.split("=", 1) for part in said.split(","))
        salt, iterations = base64.b64decode(fields["s"], validate=True), int(fields["i"])
        if not fields["r"].startswith(nonce) or not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise ValueError
    except (ValueError, KeyError):
        raise AuthenticationFailed(
            "the node's part of the sign-in makes no sense; it is not to be trusted"
        ) from None
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    without_proof = f"c=biws,r={fields['r']}"
    spoken = f"{bare},{said},{without_proof}".encode()
    signature = hmac.digest(hashlib.new(hash_name, client_key).digest(), spoken, hash_name)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(client_key, signature, strict=True))).decode()
    last = yield pack(
        REQUEST, Opcode.SASL_STEP, key=mechanism.encode(), value=f"{without_proof},p={proof}".encode()
    )
    if last.status:
        raise _denied(last)
    expected = hmac.digest(hmac.digest(salted, b"Server Key", hash_name), spoken, hash_name)
    if not hmac.compare_digest(last.value, b"v=" + base64.b64encode(expected)):
        raise AuthenticationFailed(
            "the node could not prove that it knows the password; it is not to be trusted"
        )


def _denied(answer: Answer) -> Refused:
    if answer.status != Status.AUTHENTICATION_FAILED:
        return refusal(answer)
    return AuthenticationFailed(
        "the user name or the password is wrong; write them as upr://USER:PASSWORD@HOST:PORT/BUCKET"
    )
