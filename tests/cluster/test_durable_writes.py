"""Writes that require a majority, on a cluster that itself confirms a write once one node has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.running import PATIENCE, MemberProcess, RunningCluster
from tests.server.peers import Peer
from tests.server.test_durability import ask
from upper.model.messages import Response
from upper.wire.codes import Opcode, Status

pytestmark = pytest.mark.slow


def write(node: MemberProcess, value: bytes, options: bytes) -> int:
    """The status of one write to partition 0, asked with these options and confirmed in order."""
    with Peer(node, None, timeout=PATIENCE) as peer:
        peer.ask(Opcode.HELLO, b"test", b"")  # such a connection names its partitions
        ask(peer, Opcode.SET, b"k", value, options=options, extras=bytes(8))
        answer = peer.wait_for(Response, 9)
        assert answer.status != Status.OK or peer.get(b"k").value == value
        return answer.status


def test_a_write_waits_for_the_majority_that_it_requires_and_for_no_more(tmp_path: Path) -> None:
    """One second for the majority; a replica that stands still leaves the in-sync set after two."""
    one_second = b"\x13\x01\x03\xe8"
    with RunningCluster(tmp_path, lease=30.0) as cluster:
        cluster.create(2, partitions=1, acknowledge="local")
        state = cluster.until_in_sync()
        entry = cluster.map().entries[0]
        active, replica = (cluster.nodes[state.name_of(node)] for node in entry.copies)
        assert write(active, b"1", one_second) == Status.OK
        replica.pause()
        try:
            assert write(active, b"2", b"") == Status.OK, "the bucket does not wait for replicas"
            assert write(active, b"3", one_second) == Status.SYNC_WRITE_AMBIGUOUS
            cluster.until(lambda _: len(cluster.map().entries[0].in_sync) == 1)
            assert write(active, b"4", one_second) == Status.DURABILITY_IMPOSSIBLE
            with Peer(active, None, timeout=PATIENCE) as peer:
                assert peer.get(b"k").value == b"3", "one was made, the other was not"
        finally:
            replica.resume()
        cluster.until_in_sync()
        assert write(active, b"5", b"\x11\x03") == Status.OK
        with Peer(replica, None, timeout=PATIENCE) as peer:
            assert peer.ask(Opcode.GET_REPLICA, b"k").value == b"5"
