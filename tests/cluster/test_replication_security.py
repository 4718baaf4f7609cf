"""Nodes log in to each other with the secret of their cluster, over TLS where that is configured."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from tests.cluster.replicas import ACTIVE, REPLICA, Member, equal, run, until
from tests.server.certificate import made
from upper.client.sockets import ConnectOptions
from upper.client.url import Address
from upper.cluster.replica_connection import LinkState
from upper.server.auth import CLUSTER_USER, Users, save_users
from upper.server.settings import ServerSettings, Tls

SECRET = "a secret of sixteen"


def secured(path: Path) -> ServerSettings:
    """Settings of a node with TLS and a cluster secret."""
    certificate, key = made(path)
    save_users(path / "users.json", Users())
    secret = path / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    tls = Tls(certificate=certificate, key=key)
    return ServerSettings(port=0, users=path / "users.json", cluster_secret=secret, tls=tls)


def access(path: Path, password: str) -> ConnectOptions:
    address = Address("upr", (), user=CLUSTER_USER, password=password)
    return ConnectOptions(address, ssl.create_default_context(cafile=str(path / "cert.pem")))


def test_a_replica_logs_in_with_the_secret_of_the_cluster_over_tls(tmp_path: Path) -> None:
    async def main() -> None:
        settings = secured(tmp_path)
        active = await Member(tmp_path / "a", settings=settings).start()
        await active.lead()
        copy = await Member(
            tmp_path / "b", node_id=REPLICA, settings=settings, access=access(tmp_path, SECRET)
        ).start()
        for number in range(500):
            active[number % 4].write(b"key-%d" % number, b"x" * number)
        copy.follow(active)
        await equal(active, copy)
        active[0].write(b"later", b"live")
        await equal(active, copy)
        await copy.stop()
        await active.stop()

    run(main)


@pytest.mark.parametrize("password", ["not the secret of them", None])
def test_a_node_without_the_secret_replicates_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, password: str | None
) -> None:
    async def main() -> None:
        settings = secured(tmp_path)
        active = await Member(tmp_path / "a", settings=settings).start()
        await active.lead()
        active[0].write(b"k", b"v")
        stranger = access(tmp_path, password or "")
        if password is None:
            stranger = ConnectOptions(Address("upr", ()), stranger.tls)
        copy = await Member(tmp_path / "b", node_id=REPLICA, access=stranger).start()
        with caplog.at_level(logging.WARNING):
            copy.follow(active)
            link = copy.links.links[ACTIVE]
            await until(lambda: link.state is LinkState.WAITING)
        assert "replication is interrupted" in caplog.text
        assert password is None or "start both with the same --cluster-secret" in caplog.text
        assert not copy.node.counters.replica_connections
        assert copy[0].high == 0
        await copy.stop()
        await active.stop()

    run(main)
