"""Promotion of a partition over the wire: the response reports what happened, and other partitions go on."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

import upper
from tests.nodes import Node
from tests.server.inside import Held, Running
from tests.server.peers import Peer
from upper.errors import TemporaryFailure
from upper.model.messages import EndReason, Request, Response, RollbackAnswer, SnapshotEndMessage, StreamEnd
from upper.model.values import Partition
from upper.wire.codes import Opcode, Status

ACTIVE, DEAD = b"\0\0\0\1", b"\0\0\0\4"


class Pieces(Held):
    """A disk whose journal can be full, and which can hold partition files before they get their names."""

    def __init__(self) -> None:
        super().__init__()
        self.journal_full = self.partitions_full = False
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._journal: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        (self._journal.add if path.parent.name == "journal" else self._journal.discard)(fd)
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.journal_full and fd in self._journal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)

    def rename(self, source: Path, target: Path) -> None:
        if target.suffix == ".part":
            if self.partitions_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.begun.set()
            assert self.go_on.wait(20)
        super().rename(source, target)


def promotion(**options: object) -> bytes:
    return json.dumps({"promote": True, **options}).encode()


def test_a_full_journal_during_a_promotion_neither_undoes_it_nor_hides_it(tmp_path: Path) -> None:
    disk = Pieces()
    with Running(tmp_path / "data", disk=disk) as running, running.peer() as peer, running.peer() as consumer:
        for number in range(20):
            assert peer.set(b"k%02d" % number, b"v").status == 0
        branch = consumer.accepted().versions[0].branch
        consumer.changes(20)
        disk.journal_full = True
        answer = peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", value=promotion(to=10))
        assert answer.status == 0
        answered = json.loads(answer.value)
        assert (answered["seqno"], answered["high"]) == (10, 20)
        assert int(answered["branch"]) != branch
        reported = peer.follow(0, start=20, branch=branch)
        assert isinstance(reported, RollbackAnswer)
        assert reported.seqno == 10
        disk.journal_full = False
    with Running(tmp_path / "data") as running, running.peer() as peer:
        peer.set(b"another", b"v")
        reported = peer.follow(0, start=20, branch=branch)
        assert isinstance(reported, RollbackAnswer)
        assert reported.seqno == 10


def test_a_promotion_that_the_disk_refuses_is_reported_at_once(tmp_path: Path) -> None:
    disk = Pieces()
    with Running(tmp_path / "data", disk=disk) as running, running.peer() as peer:
        for number in range(5):
            peer.set(b"k%d" % number, b"v")
        disk.partitions_full = True
        with (
            upper.connect(f"upr://127.0.0.1:{running.port}", timeout=30) as bucket,
            pytest.raises(TemporaryFailure, match=r"No space left on device.*; it stays at 5"),
        ):
            bucket.promote(0, to=2)
        assert peer.set(b"k5", b"v").status == 0


def test_while_a_partition_is_rolled_back_the_others_are_served(tmp_path: Path) -> None:
    disk = Pieces()
    running = Running(tmp_path / "data", disk=disk)
    with running, running.peer() as admin, running.peer() as peer, running.peer() as consumer:
        for number in range(5):
            peer.set(b"k%d" % number, b"v")
        consumer.accepted()
        consumer.changes(5)
        consumer.wait_for(SnapshotEndMessage)
        disk.go_on.clear()
        admin.send(Request(opcode=Opcode.SET_VBUCKET_STATE, extras=b"\1", value=promotion(to=2), opaque=9))
        assert disk.begun.wait(20)
        assert peer.set(b"other", b"v", partition=1).status == 0
        assert peer.get(b"k4").value == b"v"
        assert peer.set(b"k4", b"w").status == Status.TEMPORARY_FAILURE
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=DEAD).status == Status.TEMPORARY_FAILURE
        disk.go_on.set()
        assert json.loads(admin.wait_for(Response, 9).value)["seqno"] == 2
        assert consumer.wait_for(StreamEnd).reason == EndReason.STATE_CHANGED
        assert peer.get(b"k4").status == Status.KEY_NOT_FOUND
        assert peer.set(b"k4", b"w").status == 0


def test_a_client_that_leaves_does_not_stop_its_promotion(tmp_path: Path) -> None:
    disk = Pieces()
    with Running(tmp_path / "data", disk=disk) as running, running.peer() as peer:
        for number in range(5):
            peer.set(b"k%d" % number, b"v")
        disk.go_on.clear()
        with running.peer() as admin:
            admin.send(
                Request(opcode=Opcode.SET_VBUCKET_STATE, extras=b"\1", value=promotion(to=2), opaque=9)
            )
            assert disk.begun.wait(20)
        disk.go_on.set()
        while peer.get(b"k4").status == 0:
            pass
        assert peer.set(b"k4", b"w").status == 0


def test_a_dry_run_returns_where_it_would_go_and_changes_nothing(node: Node, peer: Peer) -> None:
    for number in range(5):
        peer.set(b"k%d" % number, b"v")
    answer = peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", value=promotion(to=3, dry_run=True))
    assert json.loads(answer.value) == {"partition": 0, "seqno": 3, "high": 5, "dry_run": True}
    assert peer.get(b"k4").value == b"v"
    assert peer.stats("failovers 0")["vb_0:num_entries"] == "1"


def test_a_deleted_copy_is_empty_and_another_history_after_a_kill(node: Node) -> None:
    with Peer(node) as peer:
        peer.set(b"k", b"v")
        branch = peer.accepted().versions[0].branch
        peer.wait_for(SnapshotEndMessage)
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=DEAD).status == 0
        assert peer.ask(Opcode.DELETE_VBUCKET).status == 0
    node.kill()
    node.restart()
    with Peer(node) as peer:
        assert peer.ask(Opcode.GET_VBUCKET_STATE).value == DEAD
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=ACTIVE).status == 0
        assert peer.get(b"k").status == Status.KEY_NOT_FOUND
        reported = peer.follow(Partition(0), start=1, branch=branch)
        assert isinstance(reported, RollbackAnswer)
        assert reported.seqno == 0


def test_a_rollback_does_not_read_the_consumers_beside_the_loop_that_changes_them(tmp_path: Path) -> None:
    with Running(tmp_path / "data") as running, running.peer() as peer:
        threads: set[str] = set()

        def seen(partition: int) -> int:
            threads.add(threading.current_thread().name)
            return 2**63

        running.bucket.seen = seen
        for number in range(5):
            peer.set(b"k%d" % number, b"v")
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", value=promotion(to=2)).status == 0
        assert not [name for name in threads if name.startswith("upper-rollback")]
