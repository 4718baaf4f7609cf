"""Every refusal on a UPR/0 connection is UPR/0's own response type 4, also before the dialect is fixed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.messages import FailoverLogRequest, Refusal, StreamAccepted, StreamRequest
from upper.model.values import Partition
from upper.server.auth import Role, User, Users, save_users
from upper.wire.packet import HEADER
from upper.wire.upr0 import UPR0

P0 = Partition(0)


def long_form(flags: int, opaque: int) -> bytes:
    """The 40-byte form of a stream request, with flags in front."""
    extras = struct.pack(">IIQQQQ", flags, 0, 0, 2**64 - 1, 0, 0)
    return HEADER.pack(0x80, 0x01, 0, len(extras), 1, 0, len(extras), opaque, 0) + extras


@pytest.mark.parametrize(
    "request_", [StreamRequest(partition=P0, opaque=7), FailoverLogRequest(partition=P0, opaque=7)]
)
def test_a_request_before_login_is_refused_in_upr0(
    tmp_path: Path, request_: StreamRequest | FailoverLogRequest
) -> None:
    file = tmp_path / "users.json"
    save_users(file, Users({"ann": User.new("ann", "secret", Role.everything())}))
    with Node(tmp_path / "data", "--users", str(file)).start() as node, Peer(node, UPR0) as peer:
        peer.send(request_)
        refused = peer.wait_for(Refusal, 7)
        assert refused.opcode == 0x01
        assert b"login" in refused.value


def test_an_oversized_first_request_is_refused_in_upr0(node: Node) -> None:
    with Peer(node, UPR0) as peer:
        peer.socket.sendall(HEADER.pack(0x80, 0x01, 0, 32, 1, 0, 2**30, 9, 0) + bytes(32))
        refused = peer.wait_for(Refusal, 9)
        assert refused.opcode == 0x01
        assert b"1073741824" in refused.value


@pytest.mark.parametrize("flag", [0x01, 0x10])
def test_a_flag_that_asks_for_the_failover_log_is_refused_in_upr0(node: Node, flag: int) -> None:
    """UPR/0 accepts a stream with an empty answer: the log has no place there."""
    with Peer(node, UPR0) as peer:
        peer.socket.sendall(long_form(flag, 11))
        refused = peer.wait_for(Refusal, 11)
        assert b"request type 2" in refused.value
        peer.socket.sendall(long_form(0, 12))
        assert peer.wait_for(StreamAccepted, 12).versions == ()
