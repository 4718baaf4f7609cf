"""Access to a node with users: passwords and TLS, from the URL and from arguments."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
import upper.aio
from tests.nodes import Node
from tests.server.certificate import made as certificate_in
from upper.errors import AuthenticationFailed, BadUrl, NotAllowed, Unreachable
from upper.server.auth import Role, User, Users, save_users


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Path]]:
    """A node with TLS and two users, and its certificate."""
    home = tmp_path_factory.mktemp("guarded")
    (certificate, key), users = certificate_in(home), home / "users.json"
    known = Users().with_user(User.new("boss", "p:w@d", Role.everything()))
    save_users(users, known.with_user(User.new("reader", "r", Role.READ)))
    options = ("--users", str(users), "--tls-cert", str(certificate), "--tls-key", str(key))
    with Node(home / "data", *options) as node:
        yield node, certificate


def test_a_user_and_tls_from_the_url(guarded: tuple[Node, Path]) -> None:
    node, certificate = guarded
    url = f"uprs://boss:p%3Aw%40d@127.0.0.1:{node.port}/default?ca={certificate}"
    with upper.connect(url) as bucket:
        bucket.set_many((f"k{n}", "v" * 1000) for n in range(2000))
        assert len(bucket.get_many(f"k{n}" for n in range(2000))) == 2000
        assert sum(e.operation == "mutation" for e in bucket.changes(until="now")) == 2000
        assert sum(batch.num_rows for batch in bucket.changes_arrow(until="now")) == 2000

    async def main() -> None:
        async with upper.aio.connect(url) as it:
            assert (await it.get("k1")).value == b"v" * 1000
            assert sum([batch.num_rows async for batch in it.changes_arrow(until="now")]) == 2000

    asyncio.run(main())


def test_a_user_and_tls_from_arguments(guarded: tuple[Node, Path]) -> None:
    node, certificate = guarded
    context = ssl.create_default_context(cafile=str(certificate))
    with upper.connect(node.url, user="boss", password="p:w@d", tls=context) as bucket:
        bucket.set("a", "1")
        assert bucket.get("a").value == b"1"


def test_a_certificate_without_a_known_authority_is_not_trusted(guarded: tuple[Node, Path]) -> None:
    node, _ = guarded
    with pytest.raises(Unreachable, match="name its authority"):
        upper.connect(node.url, user="boss", password="p:w@d", tls=True)
    with pytest.raises(BadUrl, match="PEM"):
        upper.connect(node.url + "?tls=on&ca=none.pem")


def test_wrong_and_missing_credentials_have_different_errors(guarded: tuple[Node, Path]) -> None:
    node, certificate = guarded
    context = ssl.create_default_context(cafile=str(certificate))
    with pytest.raises(AuthenticationFailed, match="wrong"):
        upper.connect(node.url, user="boss", password="wrong", tls=context)
    with pytest.raises(AuthenticationFailed, match="//USER@"):
        upper.connect(node.url, tls=context).get("a")
    with upper.connect(node.url, user="reader", password="r", tls=context) as bucket:
        bucket.get_many(["a"])
        with pytest.raises(NotAllowed):
            bucket.set("a", "1")
        with pytest.raises(NotAllowed):
            list(bucket.changes(until="now"))


def test_a_client_without_tls_cannot_use_a_node_with_tls(guarded: tuple[Node, Path]) -> None:
    node, _ = guarded
    with pytest.raises(upper.UpperError):
        upper.connect(node.url, timeout=3)
