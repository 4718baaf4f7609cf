"""Memcached clients that name no partition: the node routes their keys by the hash, as other clients do.

The table of docs/guide/memcached.md lists the clients that work; each row of it is a client that is run here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import bmemcached
import pytest

import upper
from tests.nodes import Node
from tests.server.peers import Peer
from upper.client.bucket import Bucket
from upper.model.messages import StreamFlag
from upper.model.values import partition_of
from upper.wire.codes import Opcode, Status

PARTITIONS = 16
KEYS = [b"key-%d" % number for number in range(64)]
AWAY = next(key for key in KEYS if partition_of(key, PARTITIONS) == 3)  # no key of partition 0
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "memcached.md"


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    data = tmp_path_factory.mktemp("node") / "data"
    with Node(data, partitions=PARTITIONS, plain_clients="route").start() as running:
        yield running


def holds(node: Node, key: bytes) -> list[int]:
    """The partitions that hold this key, asked for one by one."""
    with Peer(node) as peer:
        peer.ask(Opcode.HELLO)
        return [number for number in range(PARTITIONS) if peer.get(key, partition=number).status == 0]


def value(bucket: Bucket, key: bytes) -> bytes:
    item = bucket.get(key)
    assert item is not None
    return item.value


def test_a_plain_client_and_the_library_share_one_copy_of_each_key(routing: Node) -> None:
    with upper.connect(routing.url) as bucket, Peer(routing, None) as plain:
        for key in KEYS:
            bucket.set(key, b"library")
            assert plain.get(key).value == b"library"
            assert plain.set(key, b"plain").status == 0
            assert value(bucket, key) == b"plain"
    assert all(holds(routing, key) == [partition_of(key, PARTITIONS)] for key in KEYS)


def test_commands_outside_the_fast_path_are_routed_too(routing: Node) -> None:
    key = b"counter-of-a-plain-client"
    with Peer(routing, None) as plain:
        assert plain.ask(Opcode.INCREMENT, key, extras=bytes(7) + b"\1" + bytes(12)).status == 0
        assert plain.ask(Opcode.TOUCH, key, extras=b"\0\0\xff\xff").status == 0
        assert plain.ask(Opcode.APPEND, key, b"1").status == 0
        assert plain.set(key, b"5", cas=plain.get(key).cas).status == 0
        assert plain.delete(b"no-such-counter").status == Status.KEY_NOT_FOUND
    assert holds(routing, key) == [partition_of(key, PARTITIONS)]


SHOWS: dict[str, Callable[[Peer], object]] = {
    "HELLO": lambda peer: peer.ask(Opcode.HELLO),
    "a map request": lambda peer: peer.ask(Opcode.GET_CLUSTER_CONFIG),
    "a non-zero vbucket": lambda peer: peer.get(b"anything", partition=1),
    "a NOOP with a vbucket": lambda peer: peer.ask(Opcode.NOOP, partition=1),
    "a stream request": lambda peer: peer.follow(5, flags=StreamFlag.UNTIL_NOW),
}


@pytest.mark.parametrize("shown", SHOWS)
def test_a_client_that_has_named_a_partition_chooses_partitions_itself(routing: Node, shown: str) -> None:
    key = f"{AWAY.decode()}-{shown}".encode()
    while partition_of(key, PARTITIONS) == 0:
        key += b"."
    with Peer(routing) as peer:
        assert peer.set(key, b"before").status == 0
        SHOWS[shown](peer)
        assert peer.get(key).status == Status.KEY_NOT_FOUND
        assert peer.set(key, b"after").status == 0
    assert holds(routing, key) == [0, partition_of(key, PARTITIONS)]


def test_a_pipeline_is_split_where_the_first_request_names_a_partition(routing: Node) -> None:
    """The compiled run stops in the middle of a read, and what follows counts as named."""
    key = next(k for k in (b"pipelined-%d" % n for n in range(99)) if partition_of(k, PARTITIONS) > 1)
    head = bytes.fromhex("8011") + len(key).to_bytes(2, "big") + b"\x08\0"

    def setq(partition: int, value: bytes) -> bytes:
        body = bytes(8) + key + value
        return head + partition.to_bytes(2, "big") + len(body).to_bytes(4, "big") + bytes(12) + body

    with Peer(routing, None) as peer:
        peer.socket.sendall(setq(0, b"routed") + setq(1, b"named") + setq(0, b"named"))
        assert peer.ask(Opcode.NOOP).status == 0
    assert holds(routing, key) == sorted([0, 1, partition_of(key, PARTITIONS)])


def test_a_key_of_a_partition_that_is_elsewhere_is_not_taken(tmp_path: Path) -> None:
    with Node(tmp_path / "data", plain_clients="route").start() as node:
        with Peer(node) as admin:
            assert admin.ask(Opcode.SET_VBUCKET_STATE, extras=b"\4", partition=3).status == 0
        with Peer(node, None) as plain:
            assert plain.set(AWAY, b"v").status == Status.NOT_MY_VBUCKET
            assert plain.get(AWAY).status == Status.NOT_MY_VBUCKET


def test_partition_0_takes_the_field_literally(tmp_path: Path) -> None:
    with Node(tmp_path / "data", plain_clients="partition-0").start() as node:
        with Peer(node, None) as plain:
            assert plain.set(AWAY, b"v").status == 0
        assert holds(node, AWAY) == [0]


# ── The table of clients ──────────────────────────────────────────────────────────────────────────


def _bmemcached(node: Node) -> None:
    client = bmemcached.Client((f"127.0.0.1:{node.port}",))
    assert client.set_multi({f"b-{n}": str(n) for n in range(100)}) == []
    with upper.connect(node.url) as bucket:
        assert [value(bucket, b"b-%d" % n) for n in range(100)] == [b"%d" % n for n in range(100)]
        bucket.set(b"b-7", b"theirs")
    assert client.get("b-7") in ("theirs", b"theirs")
    client.disconnect_all()


def _pylibmc(node: Node) -> None:
    pylibmc = pytest.importorskip("pylibmc", reason="pylibmc has no wheel for this Python")
    client = pylibmc.Client([f"127.0.0.1:{node.port}"], binary=True)
    assert client.set_multi({f"l-{n}": str(n) for n in range(100)}) == []
    with upper.connect(node.url) as bucket:
        assert value(bucket, b"l-42") == b"42"
        bucket.set(b"l-42", b"theirs")
    assert client.get("l-42") == "theirs" or client.get("l-42") == b"theirs"
    client.disconnect_all()


def _memccapable(node: Node) -> None:
    if shutil.which("memccapable") is None:
        pytest.skip("libmemcached-tools has it")
    command = ("memccapable", "-b", "-t", "20", "-h", "127.0.0.1", "-p", str(node.port))
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "All tests passed" in run.stdout, run.stdout


def _library(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set(b"u-1", b"v")
    assert holds(node, b"u-1") == [partition_of(b"u-1", PARTITIONS)]


CLIENTS: dict[str, Callable[[Node], None]] = {
    "upper": _library,
    "python-binary-memcached": _bmemcached,
    "pylibmc": _pylibmc,
    "memccapable": _memccapable,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_that_the_guide_lists_works(routing: Node, client: str) -> None:
    CLIENTS[client](routing)


def test_the_guide_lists_exactly_the_clients_that_are_tested() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(CLIENTS)
