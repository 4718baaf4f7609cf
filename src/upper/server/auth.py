"""Users, their roles, and the SASL exchanges that authenticate them.

The users file holds no passwords. For each user and hash it keeps what SCRAM (RFC 5802) needs to verify one:
salt, iteration count, stored key and server key; PLAIN is checked against the same. Comparisons take the same
time whether they fail early or late, and an unknown user costs as much as a wrong password, so that neither
reveals whether a name exists.

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
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path

from upper.errors import AuthenticationFailed, UpperError

ITERATIONS = 15_000
HASHES: Mapping[str, str] = {"SCRAM-SHA-512": "sha512", "SCRAM-SHA-256": "sha256"}
# Couchbase's clients accept these names alone, for the same exchange.
SYNONYMS: Mapping[str, str] = {"SCRAM-SHA512": "SCRAM-SHA-512", "SCRAM-SHA256": "SCRAM-SHA-256"}
MECHANISMS = (*HASHES, *SYNONYMS, "PLAIN")
CLUSTER_USER = "@cluster"  # how the nodes of a cluster log in to each other
WRONG = "the user name or the password is wrong"
REMEDY = "restore it from a copy, or remove it and create another with `upper users`"


class BadUsersFile(UpperError):
    """The users file cannot be used."""

    exit_code = 2


class Role(Flag):
    """What a user may do. Each command requires one role."""

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
    """The data that verifies a password under one hash; the password cannot be derived from it."""

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
    """All users of a node."""

    users: Mapping[str, User] = field(default_factory=dict)
    # Replaces the secret of an unknown user, so that a wrong name costs what a wrong password costs. The salt
    # of an unknown name is derived from it, since it must be the same each time.
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


def read_secret(path: Path) -> str:
    """The first line of the file with the secret of a cluster."""
    try:
        if path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise BadUsersFile(f"other users of this machine can read {path}; run `chmod 600 {path}`")
        secret = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadUsersFile(f"the cluster secret {path} cannot be read ({why}); check the path") from None
    if len(secret) < 16:
        raise BadUsersFile(
            f"the cluster secret in {path} has fewer than 16 characters; "
            f"write one with `openssl rand -hex 32 > {path}`"
        )
    return secret


def users_of(users: Path | None, cluster_secret: Path | None) -> Users | None:
    """The users of a node, with the one for the other nodes of its cluster."""
    if users is None:
        return None
    found = load_users(users)
    if cluster_secret is None:
        return found
    roles = Role.READ | Role.STREAM
    return found.with_user(User.new(CLUSTER_USER, read_secret(cluster_secret), roles))


def load_users(path: Path) -> Users:
    """Read a users file; an error is one sentence."""
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            raise BadUsersFile(f"every user of this machine can write {path}; run `chmod 600 {path}`")
        content = json.loads(path.read_text())
        if content["version"] != 1:
            raise BadUsersFile(f"{path} is of version {content['version']}; this release reads version 1")
        return Users({name: _user(name, entry) for name, entry in content["users"].items()})
    except FileNotFoundError:
        raise BadUsersFile(
            f"there is no users file {path}; make one with `upper users {path} add NAME`"
        ) from None
    except json.JSONDecodeError as error:
        raise BadUsersFile(
            f"{path} is not a users file: no JSON at line {error.lineno}, column {error.colno}; {REMEDY}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadUsersFile(f"{path} is not a users file: a part of it is missing; {REMEDY}") from error


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
    try:
        # A new name that cannot be predicted, never an existing file or link, readable by its owner alone.
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise BadUsersFile(
            f"cannot write {path} ({error.strerror}); {_directory_remedy(path.parent)}"
        ) from None
    try:
        with open(descriptor, "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except OSError as error:
        os.unlink(name)
        raise BadUsersFile(f"cannot write {path} ({error.strerror}); nothing was changed") from None


def _directory_remedy(directory: Path) -> str:
    return f"make {directory} writable" if directory.is_dir() else f"create the directory {directory} first"


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
    """The exchange continues: the peer must answer this."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The peer is authenticated. `data` is the server's own proof, where the mechanism has one."""

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

    @property
    def name(self) -> str:
        """The user that the exchange is about; empty before the first message."""
        return "" if self._first is None else self._first[0]

    def step(self, data: bytes, *, allow: Callable[[str], None] = lambda name: None) -> Challenge | Welcome:
        """The answer to a message. `allow` may refuse the user of a proof before the proof is evaluated."""
        try:
            text = data.decode()
            if self._first is None:
                return self._answer(text)
            allow(self.name)
            return self._verify(text)
        except (ValueError, KeyError, IndexError) as error:
            raise AuthenticationFailed("this is not a SCRAM message of the exchange") from error

    def _answer(self, text: str) -> Challenge:
        binding, other, bare = text.split(",", 2)
        if binding not in ("n", "y"):
            raise AuthenticationFailed("channel binding is not offered here")
        fields = _fields(bare)
        name = fields["n"].replace("=2C", ",").replace("=3D", "=")
        if other not in ("", f"a={fields['n']}"):
            raise AuthenticationFailed(
                "an authorization id other than the user name is not supported; leave it out"
            )
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
        message = f"{bare},{reply},{without_proof}".encode()
        signature = hmac.digest(secret.stored_key, message, self._hash)
        proof = _bytes(proof_text)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        right = hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), secret.stored_key)
        fresh = hmac.compare_digest(fields["r"].encode(), _fields(reply)["r"].encode())
        bound = _bytes(fields["c"]) == opening.encode()  # the first message was not changed on the way
        user = self._users.find(name)
        if user is None or not right or not fresh or not bound:
            raise AuthenticationFailed(WRONG)
        return Welcome(user, f"v={_text(hmac.digest(secret.server_key, message, self._hash))}".encode())


def _fields(text: str) -> dict[str, str]:
    pairs = (part.split("=", 1) for part in text.split(","))
    return {pair[0]: pair[1] for pair in pairs}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
