"""Copies of a data directory: the original and its copy never continue under the same branch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import upper
from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.messages import RollbackAnswer

PARTITIONS = 4


def branches(node: Node) -> int:
    with Peer(node) as peer:
        return int(peer.stats("failovers 0")["vb_0:num_entries"])


@pytest.mark.parametrize("running", [False, True], ids=["stopped", "killed-original"])
def test_a_copied_directory_begins_a_branch_and_its_consumers_roll_back(
    tmp_path: Path, running: bool
) -> None:
    original = Node(tmp_path / "data", partitions=PARTITIONS).start()
    with Peer(original) as peer:
        for number in range(2):
            peer.set(b"k%d" % number, b"both")
    if running:
        original.kill()
    else:
        original.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    original.restart()
    with Peer(original) as peer:
        peer.set(b"k2", b"original")
        branch = peer.accepted().versions[0].branch
    assert branches(original) == 1, "the original goes on as it was"
    with Node(tmp_path / "copy", partitions=PARTITIONS).start() as copy, Peer(copy) as peer:
        peer.set(b"k2", b"copy")
        assert branches(copy) == 2
        reported = peer.follow(0, start=3, branch=branch)
        assert isinstance(reported, RollbackAnswer)
        assert reported.seqno == 2
        peer.accepted(0, start=2, branch=branch)
        copy.stop()
        copy.restart()
        assert branches(copy) == 2, "once"
    original.stop()


def test_a_consumer_that_moves_to_a_restored_copy_ends_with_what_the_copy_holds(tmp_path: Path) -> None:
    original = Node(tmp_path / "data", partitions=PARTITIONS).start()
    with upper.connect(original.url) as bucket:
        bucket.set_many({f"key{n}": "before" for n in range(50)})
    original.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    original.restart()
    table: dict[bytes, bytes] = {}
    undo: list[tuple[int, int | None, bytes, bytes | None]] = []  # partition, seqno, key, value before
    checkpoint = upper.Checkpoint(tmp_path / "here.json")

    def follow(url: str) -> None:
        with upper.connect(url) as bucket:
            for event in bucket.changes(checkpoint=checkpoint, until="now", on_rollback="continue"):
                match event:
                    case upper.Mutation():
                        undo.append((event.partition, event.seqno, event.key, table.get(event.key)))
                        table[event.key] = event.value
                    case upper.Rollback():
                        for partition, seqno, key, value in reversed(undo):
                            if partition == event.partition and seqno is not None and seqno > event.to:
                                table.pop(key, None)
                                if value is not None:
                                    table[key] = value

    with upper.connect(original.url) as bucket:
        bucket.set_many({f"key{n}": "original" for n in range(0, 50, 2)})
        bucket.set_many({f"new{n}": "original" for n in range(20)})
    follow(original.url)
    original.stop()
    with Node(tmp_path / "copy", partitions=PARTITIONS).start() as copy:
        with upper.connect(copy.url) as bucket:
            bucket.set_many({f"key{n}": "copy" for n in range(1, 50, 2)})
            bucket.set_many({f"new{n}": "copy" for n in range(10, 15)})
        follow(copy.url)
    expected = {b"key%d" % n: b"copy" if n % 2 else b"before" for n in range(50)}
    assert table == expected | {b"new%d" % n: b"copy" for n in range(10, 15)}


def test_restored_begins_a_branch_where_a_copy_cannot_be_recognised(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", partitions=PARTITIONS).start()
    with Peer(node) as peer:
        peer.set(b"k", b"v")
    node.stop()
    node = Node(tmp_path / "data", "--restored", partitions=PARTITIONS).start()
    assert branches(node) == 2
    with Peer(node) as peer:
        assert peer.get(b"k").value == b"v"
    node.stop()


def test_a_directory_that_is_moved_keeps_its_branch(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", partitions=PARTITIONS).start()
    node.stop()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    node = Node(tmp_path / "elsewhere", partitions=PARTITIONS).start()
    assert branches(node) == 1
    node.stop()


@pytest.mark.parametrize("options", [(), ("--restored",)])
def test_no_bucket_is_made_among_other_files(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "passwd").write_text("root")
    done = subprocess.run(
        [sys.executable, "-m", "upper", "serve", "--data", str(tmp_path), "--port", "0", *options],
        capture_output=True, timeout=60, check=False, text=True,
    )  # fmt: skip
    assert done.returncode
    assert ("there is no bucket in" if options else "holds other files, such as 'passwd'") in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]
