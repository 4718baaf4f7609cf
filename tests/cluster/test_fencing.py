"""Nodes that must not answer: stopped for longer than their lease, or without their agreement store."""

from __future__ import annotations

from pathlib import Path

import pytest

import upper
from tests.cluster.etcd import Etcd
from tests.cluster.running import PATIENCE, History, MemberProcess, RunningCluster
from tests.server.peers import Peer
from upper.cluster import administration
from upper.model.messages import Request, Response
from upper.model.values import Partition, partition_of
from upper.wire.codes import Opcode, Status

pytestmark = pytest.mark.slow
PARTITIONS = 16
REFUSED = {Status.NOT_MY_VBUCKET, Status.TEMPORARY_FAILURE}


def keys_of(cluster: RunningCluster, name: str) -> list[bytes]:
    """Keys in partitions that are active on a node."""
    state = cluster.state()
    entries = administration.bucket_of(state).entries
    keys = [f"key-{number}".encode() for number in range(200)]
    return [key for key in keys if state.name_of(entries[where(key)].active) == name][:20]


def where(key: bytes) -> Partition:
    return partition_of(key, PARTITIONS)


def set_request(key: bytes, value: bytes, opaque: int) -> Request:
    return Request(
        opcode=Opcode.SET, key=key, value=value, extras=bytes(8), partition=where(key), opaque=opaque
    )


def answers(peer: Peer, count: int) -> list[Response]:
    found: list[Response] = []
    while len(found) < count:
        found += [message for message in peer.receive() if isinstance(message, Response)]
    return found


@pytest.mark.parametrize("acknowledge", ["in-sync", "local"])
def test_a_node_that_was_stopped_longer_than_its_lease_acknowledges_nothing_and_reads_nothing_stale(
    acknowledge: str, tmp_path: Path
) -> None:
    with RunningCluster(tmp_path, lease=2.0) as cluster:
        cluster.create(2, partitions=PARTITIONS, acknowledge=acknowledge)
        stopped: MemberProcess = cluster.nodes["n1"]
        keys = keys_of(cluster, "n1")
        with (
            cluster.connect() as bucket,
            Peer(stopped, None, timeout=PATIENCE) as peer,
            Peer(stopped, None, timeout=PATIENCE) as reader,  # its answers wait for no write
        ):
            for key in keys:
                bucket.set(key, b"old")
            assert all(reader.get(key, partition=where(key)).value == b"old" for key in keys)
            peer.get(keys[0], partition=where(keys[0]))
            stopped.pause()
            # These wait in the socket of the process, and are the first that it sees when it continues.
            for number, key in enumerate(keys):
                for each in (peer, reader):
                    each.send(Request(opcode=Opcode.GET, key=key, partition=where(key), opaque=number))
                peer.send(set_request(key, b"from the stopped node", 1000 + number))
            cluster.until(
                lambda state: all(
                    state.name_of(entry.active) == "n2" for entry in administration.bucket_of(state).entries
                )
            )
            with Peer(cluster.nodes["n2"], None, timeout=PATIENCE) as second:
                while second.stats("cluster")["active"] != str(PARTITIONS):
                    pass  # until it has read the map
            with upper.connect(cluster.nodes["n2"].url, timeout=PATIENCE) as other:
                for key in keys:
                    other.set(key, b"new")
            stopped.resume()
            found = answers(reader, len(keys)) + answers(peer, 2 * len(keys))
            assert {answer.status for answer in found} <= REFUSED, found
            assert all(bucket.get(key).value == b"new" for key in keys)
            cluster.until_in_sync()
            assert all(bucket.get(key).value == b"new" for key in keys)


def test_without_the_agreement_store_nodes_stop_in_time_and_go_on_when_it_is_back(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd")
    try:
        with RunningCluster(tmp_path, f"etcd://127.0.0.1:{etcd.port}/c", lease=3.0) as cluster:
            cluster.create(2, partitions=PARTITIONS)
            keys = {name: keys_of(cluster, name) for name in cluster.nodes}
            before = cluster.map()
            history = History(cluster)
            with history.running():
                history.until_acknowledged(50)
                etcd.stop()
                for name, node in cluster.nodes.items():
                    key = keys[name][0]
                    with Peer(node, None, timeout=PATIENCE) as peer:
                        while peer.get(key, partition=where(key)).status not in REFUSED:
                            pass  # until its lease has ended
                etcd.start()
                history.until_acknowledged(50)
            history.check()
            after = cluster.map()
            assert [len(entry.copies) for entry in after.entries] == [len(e.copies) for e in before.entries]
            for node in cluster.nodes.values():
                count = node.log.count("trying again, and the map does not change until it answers")
                assert 1 <= count <= 3, "it is logged when it begins, not at every attempt"
                assert "the agreement store answers again" in node.log
    finally:
        etcd.stop()
