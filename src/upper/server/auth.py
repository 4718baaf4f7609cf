"""Who may come in: users, their roles, and the SASL exchanges that prove them.

The users file holds no passwords. For each user and hash it keeps what SCRAM (RFC 5802) needs to verify
one: salt, iteration count, stored key and server key; PLAIN is checked against the same. Comparisons take
the same time whether they fail early or late, and an unknown user costs as much as a wrong password, so
that neither answers the question whether a name exists.

The file, as JSON:

    {"version": 1, "users": {"ann": {"roles": ["read", "write"],
        "SCRAM-SHA-256": {"salt": base64, "iterations": 15000, "stored_key": base64, "server_key": base64},
        "SCRAM-SHA-512": {...}}}}
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path

from upper.errors import AuthenticationFailed, UpperError

ITERATIONS = 15_000
HASHES: Mapping[str, str] = {"SCRAM-SHA-512": "sha512", "SCRAM-SHA-256": "sha256"}
MECHANISMS = (*HASHES, "PLAIN")
WRONG = "the user name or the password is wrong"


class BadUsersFile(UpperError):
    """The users file cannot be used."""

    exit_code = 2


class Role(Flag):
    """What a user may do. Each command names the one it needs."""

    NONE = 0
    READ = auto()
    WRITE = auto()
    STREAM = auto()
    ADMIN = auto()

    @classmethod
    def everything(cls) -> Role:
        return cls.READ | cls.WRITE | cls.STREAM | cls.ADMIN

    @classmethod
    def named(cls, names: Iterable[str]) -> Role:
        roles = cls.NONE
        for name in names:
            try:
                roles |= cls[name.upper()]
            except KeyError:
                raise BadUsersFile(
                    f"there is no role {name!r}; the roles are read, write, stream, admin"
                ) from None
        return roles

    @property
    def names(self) -> list[str]:
        return [str(role.name).lower() for role in Role if role in self]


@dataclass(frozen=True, slots=True)
class Secret:
    """What proves a password under one hash, without being it."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    @classmethod
    def of(cls, password: str, hash_name: str, *, salt: bytes, iterations: int = ITERATIONS) -> Secret:
        salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", hash_name)
        stored_key = hashlib.new(hash_name, client_key).digest()
        return cls(salt, iterations, stored_key, hmac.digest(salted, b"Server Key", hash_name))

    def matches(self, password: str, hash_name: str) -> bool:
        attempt = Secret.of(password, hash_name, salt=self.salt, iterations=self.iterations)
        return hmac.compare_digest(attempt.stored_key, self.stored_key)


@dataclass(frozen=True, slots=True)
class User:
    name: str
    roles: Role
    secrets: Mapping[str, Secret]

    @classmethod
    def new(cls, name: str, password: str, roles: Role) -> User:
        salt = secrets.token_bytes(16)
        return cls(
            name, roles, {mechanism: Secret.of(password, h, salt=salt) for mechanism, h in HASHES.items()}
        )


@dataclass(frozen=True)
class Users:
    """Everybody who may come in."""

    users: Mapping[str, User] = field(default_factory=dict)
    # Stands in for a user who is not there, so that a wrong name costs what a wrong password costs. The salt
    # of an unknown name is derived from it, since it must be the same each time somebody asks.
    decoy: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def find(self, name: str) -> User | None:
        return self.users.get(name)

    def secret(self, name: str, mechanism: str) -> Secret:
        """The secret of a user, or a decoy that no password matches."""
        user = self.users.get(name)
        if user is not None and mechanism in user.secrets:
            return user.secrets[mechanism]
        salt = hmac.digest(self.decoy, name.encode(), "sha256")[:16]
        return Secret(salt, ITERATIONS, bytes(hashlib.new(HASHES[mechanism]).digest_size), b"")

    def check(self, name: str, password: str) -> User:
        """PLAIN. Slow on purpose: call it off the event loop."""
        matches = self.secret(name, "SCRAM-SHA-256").matches(password, "sha256")
        user = self.users.get(name)
        if user is None or not matches:
            raise AuthenticationFailed(WRONG)
        return user

    def with_user(self, user: User) -> Users:
        return Users({**self.users, user.name: user}, self.decoy)

    def without(self, name: str) -> Users:
        return Users({key: user for key, user in self.users.items() if key != name}, self.decoy)


def load_users(path: Path) -> Users:
    """Read a users file; what is wrong with it is one sentence."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != 1:
            raise BadUsersFile(f"{path} is of version {content['version']}; this one reads version 1")
        return Users({name: _user(name, entry) for name, entry in content["users"].items()})
    except FileNotFoundError:
        raise BadUsersFile(
            f"there is no users file {path}; make one with `upper users {path} add NAME`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadUsersFile(f"{path} is not a users file ({error!r}); make one with `upper users`") from error


def save_users(path: Path, users: Users) -> None:
    """Write a users file that only its owner can read, all or nothing."""
    content = {
        "version": 1,
        "users": {
            user.name: {
                "roles": user.roles.names,
                **{
                    mechanism: {
                        "salt": _text(secret.salt),
                        "iterations": secret.iterations,
                        "stored_key": _text(secret.stored_key),
                        "server_key": _text(secret.server_key),
                    }
                    for mechanism, secret in user.secrets.items()
                },
            }
            for user in users.users.values()
        },
    }
    fresh = path.with_name(f".{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    fresh.replace(path)


def _user(name: str, entry: dict[str, object]) -> User:
    roles = entry["roles"]
    if not isinstance(roles, list):
        raise TypeError("roles must be a list")
    kept: dict[str, Secret] = {}
    for mechanism in HASHES:
        match entry.get(mechanism):
            case {
                "salt": str(salt),
                "iterations": int(count),
                "stored_key": str(stored),
                "server_key": str(server),
            }:
                kept[mechanism] = Secret(_bytes(salt), count, _bytes(stored), _bytes(server))
            case None:
                pass
            case _:
                raise ValueError(f"{mechanism} of {name} lacks a field")
    return User(name, Role.named(roles), kept)


# ── SASL ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Challenge:
    """The exchange goes on: the peer must answer this."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The peer is who it says. `data` is the server's own proof, where the mechanism has one."""

    user: User
    data: bytes = b""


def plain_credentials(data: bytes) -> tuple[str, str]:
    """The name and password of a PLAIN message: authorization id, name and password with zeros between."""
    parts = data.split(b"\0")
    if len(parts) != 3:
        raise AuthenticationFailed("PLAIN needs a name and a password with a zero byte before each")
    try:
        return parts[1].decode(), parts[2].decode()
    except UnicodeDecodeError:
        raise AuthenticationFailed("the name and the password must be UTF-8") from None


class Scram:
    """The server's side of one SCRAM exchange. Any irregularity fails as a wrong password does."""

    def __init__(self, mechanism: str, users: Users, *, nonce: str) -> None:
        self._mechanism, self._hash, self._users = mechanism, HASHES[mechanism], users
        self._nonce = nonce
        # Name, the client's header and the rest of its first message, and the server's first message.
        self._first: tuple[str, str, str, str] | None = None

    def step(self, data: bytes) -> Challenge | Welcome:
        try:
            text = data.decode()
            return self._answer(text) if self._first is None else self._verify(text)
        except (ValueError, KeyError, IndexError) as error:
            raise AuthenticationFailed("this is not a SCRAM message of the exchange") from error

    def _answer(self, text: str) -> Challenge:
        binding, other, bare = text.split(",", 2)
        if binding not in ("n", "y"):
            raise AuthenticationFailed("channel binding is not offered here")
        fields = _fields(bare)
        name = fields["n"].replace("=2C", ",").replace("=3D", "=")
        if other not in ("", f"a={fields['n']}"):
            raise AuthenticationFailed("nobody acts for somebody else here; leave the authorization id out")
        secret = self._users.secret(name, self._mechanism)
        nonce = fields["r"] + self._nonce
        reply = f"r={nonce},s={_text(secret.salt)},i={secret.iterations}"
        self._first = (name, f"{binding},{other},", bare, reply)
        return Challenge(reply.encode())

    def _verify(self, text: str) -> Welcome:
        assert self._first is not None
        name, opening, bare, reply = self._first
        without_proof, _, proof_text = text.rpartition(",p=")
        fields = _fields(without_proof)
        secret = self._users.secret(name, self._mechanism)
        said = f"{bare},{reply},{without_proof}".encode()
        signature = hmac.digest(secret.stored_key, said, self._hash)
        proof = _bytes(proof_text)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        right = hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), secret.stored_key)
        fresh = hmac.compare_digest(fields["r"].encode(), _fields(reply)["r"].encode())
        bound = _bytes(fields["c"]) == opening.encode()  # nobody in between changed how it began
        user = self._users.find(name)
        if user is None or not right or not fresh or not bound:
            raise AuthenticationFailed(WRONG)
        return Welcome(user, f"v={_text(hmac.digest(secret.server_key, said, self._hash))}".encode())


def _fields(text: str) -> dict[str, str]:
    pairs = (part.split("=", 1) for part in text.split(","))
    return {pair[0]: pair[1] for pair in pairs}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
