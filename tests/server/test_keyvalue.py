"""Key-value over a real socket: what each command means, and what it refuses."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.values import Partition
from upper.wire.codes import Feature, Opcode, Status

_keys = count()
HELLO_ALL = b"".join(
    int(f).to_bytes(2, "big") for f in (Feature.MUTATION_SEQNO, Feature.XERROR, Feature.SNAPPY)
)


@pytest.fixture
def kv(shared_node: Node) -> Iterator[Peer]:
    with Peer(shared_node, None) as peer:
        yield peer


def fresh() -> bytes:
    return b"key-%d" % next(_keys)


def test_what_was_set_is_got_with_its_flags_and_cas(kv: Peer) -> None:
    key = fresh()
    stored = kv.ask(Opcode.SET, key, b"value", extras=struct.pack(">II", 7, 0))
    found = kv.get(key)
    assert (stored.status, found.status) == (0, 0)
    assert (found.value, found.extras, found.cas) == (b"value", struct.pack(">I", 7), stored.cas)
    assert kv.ask(Opcode.GETK, key).key == key


def test_a_set_with_another_cas_is_refused_and_with_the_right_one_stored(kv: Peer) -> None:
    key = fresh()
    first = kv.set(key, b"1")
    assert kv.set(key, b"2", cas=first.cas + 1).status == Status.KEY_EXISTS
    assert kv.get(key).value == b"1"
    assert kv.set(key, b"2", cas=first.cas).status == 0
    assert kv.set(fresh(), b"2", cas=5).status == Status.KEY_NOT_FOUND


def test_commands_of_one_item_run_in_the_kernel_with_tokens_and_without(tmp_path: Path) -> None:
    stored, counted, touched = bytes(8), struct.pack(">QQI", 1, 1, 0), struct.pack(">I", 100)
    with Node(tmp_path / "data").start() as node, Peer(node, None) as plain, Peer(node, None) as tokens:
        tokens.ask(Opcode.HELLO, b"test", HELLO_ALL)
        for peer, key in ((plain, b"plain"), (tokens, b"tokens")):
            cas = peer.ask(Opcode.ADD, key, b"1", extras=stored).cas
            cas = peer.ask(Opcode.SET, key, b"1", extras=struct.pack(">II", 0, 100), cas=cas).cas
            for opcode, value, extras in (
                (Opcode.REPLACE, b"1", stored),
                (Opcode.APPEND, b"2", b""),
                (Opcode.PREPEND, b"3", b""),
                (Opcode.INCREMENT, b"", counted),
                (Opcode.DECREMENT, b"", counted),
                (Opcode.TOUCH, b"", touched),
                (Opcode.GAT, b"", touched),
                (Opcode.GATK, b"", touched),
                (Opcode.GET, b"", b""),
            ):
                assert peer.ask(opcode, key, value, extras=extras).status == 0
            locked = peer.ask(Opcode.GET_LOCKED, key)
            assert (locked.value, peer.get(key).value) == (b"312", b"312")
            assert peer.ask(Opcode.UNLOCK_KEY, key, cas=locked.cas).status == 0
            deleted = peer.delete(key)
            assert (deleted.status, len(deleted.extras)) == (0, 16 if peer is tokens else 0)
        assert {name.partition(":")[0] for name in plain.stats("timings")} <= {"run", "hello", "stat"}


def test_add_needs_nothing_and_replace_needs_something(kv: Peer) -> None:
    key, extras = fresh(), bytes(8)
    assert kv.ask(Opcode.REPLACE, key, b"1", extras=extras).status == Status.KEY_NOT_FOUND
    assert kv.ask(Opcode.ADD, key, b"1", extras=extras).status == 0
    assert kv.ask(Opcode.ADD, key, b"2", extras=extras).status == Status.KEY_EXISTS
    assert kv.ask(Opcode.REPLACE, key, b"3", extras=extras).status == 0
    assert kv.get(key).value == b"3"


def test_append_and_prepend_keep_flags_and_need_an_item(kv: Peer) -> None:
    key = fresh()
    assert kv.ask(Opcode.APPEND, key, b"x").status == Status.NOT_STORED
    kv.ask(Opcode.SET, key, b"b", extras=struct.pack(">II", 9, 0))
    assert kv.ask(Opcode.APPEND, key, b"c").status == 0
    assert kv.ask(Opcode.PREPEND, key, b"a").status == 0
    found = kv.get(key)
    assert (found.value, found.extras) == (b"abc", struct.pack(">I", 9))


def test_counters_count_wrap_and_stop_at_zero(kv: Peer) -> None:
    key = fresh()

    def step(opcode: int, delta: int, initial: int = 5, expiration: int = 0) -> tuple[int, int]:
        answer = kv.ask(opcode, key, extras=struct.pack(">QQI", delta, initial, expiration))
        return answer.status, int.from_bytes(answer.value, "big") if answer.status == 0 else -1

    assert step(Opcode.INCREMENT, 1, expiration=0xFFFFFFFF)[0] == Status.KEY_NOT_FOUND
    assert step(Opcode.INCREMENT, 1) == (0, 5)
    assert step(Opcode.INCREMENT, 3) == (0, 8)
    assert step(Opcode.DECREMENT, 100) == (0, 0)
    kv.set(key, b"%d" % (2**64 - 1))
    assert step(Opcode.INCREMENT, 2) == (0, 1)
    kv.set(key, b"many")
    assert step(Opcode.INCREMENT, 1)[0] == Status.NOT_A_NUMBER
    assert kv.get(key).value == b"many"


def test_a_delete_carries_a_cas_only_after_hello(shared_node: Node) -> None:
    with Peer(shared_node, None) as peer:
        key = fresh()
        peer.set(key, b"1")
        assert peer.delete(key).cas == 0
        peer.set(key, b"1")
        assert peer.ask(Opcode.HELLO, b"test").status == 0
        assert peer.delete(key).cas != 0
        assert peer.delete(key).status == Status.KEY_NOT_FOUND


def test_hello_negotiates_features_and_brings_mutation_tokens(shared_node: Node) -> None:
    with Peer(shared_node, None) as peer:
        agreed = peer.ask(Opcode.HELLO, b"test", HELLO_ALL).value
        assert agreed == b"\0\x04\0\x07"  # tokens and extended errors; compression is not supported
        key = fresh()
        stored = peer.set(key, b"1", partition=3)
        branch, seqno = struct.unpack(">QQ", stored.extras)
        details = peer.stats("vbucket-details 3")
        assert str(branch) == details["vb_3:branch"]
        assert str(seqno) == details["vb_3:high_seqno"]
        removed = peer.delete(key, partition=3)
        assert struct.unpack(">QQ", removed.extras) == (branch, seqno + 1)
        assert len(peer.ask(Opcode.INCREMENT, fresh(), extras=bytes(20)).extras) == 16


def test_touch_and_get_and_touch_change_the_expiration(kv: Peer) -> None:
    key = fresh()
    kv.set(key, b"v")
    assert kv.ask(Opcode.TOUCH, key, extras=struct.pack(">I", 100)).status == 0
    meta = struct.unpack(">IIIQ", kv.ask(Opcode.GET_META, key).extras)
    assert meta[0] == 0
    assert meta[2] > 1_000_000_000  # seconds since the epoch, however it was sent
    found = kv.ask(Opcode.GAT, key, extras=struct.pack(">I", 0))
    assert found.value == b"v"
    assert struct.unpack(">IIIQ", kv.ask(Opcode.GET_META, key).extras)[2] == 0
    assert kv.ask(Opcode.TOUCH, fresh(), extras=struct.pack(">I", 1)).status == Status.KEY_NOT_FOUND


def test_a_miss_is_answered_with_the_key_where_a_hit_would_be(kv: Peer) -> None:
    key = fresh()
    for opcode, extras in ((Opcode.GETK, b""), (Opcode.GATK, bytes(4))):
        missed = kv.ask(opcode, key, extras=extras)
        assert (missed.status, missed.key, missed.value) == (Status.KEY_NOT_FOUND, key, b"")


def test_json_is_the_only_data_type_and_only_for_clients_that_agreed_on_it(shared_node: Node) -> None:
    key = fresh()
    with Peer(shared_node, None) as plain, Peer(shared_node, None) as knowing:
        knowing.ask(Opcode.HELLO, b"me", Feature.JSON.to_bytes(2, "big"))
        for peer in (plain, knowing):
            packed = peer.ask(Opcode.SET, key, b"?", extras=bytes(8), data_type=0x02)
            assert packed.status == Status.INVALID_ARGUMENTS, "what it would mean was not agreed on"
        assert knowing.ask(Opcode.SET, key, b"{}", extras=bytes(8), data_type=0x01).status == 0
        assert (knowing.get(key).data_type, plain.get(key).data_type) == (1, 0)
        meta = struct.pack(">IIQQ", 0, 0, 100, 1 << 61)
        packed = knowing.ask(Opcode.SET_WITH_META, key, b"?", extras=meta, data_type=0x04)
        assert packed.status == Status.INVALID_ARGUMENTS


def test_an_item_whose_time_has_come_is_gone(kv: Peer) -> None:
    key = fresh()
    past = 1_500_000_000
    kv.set(key, b"v", expiration=past)
    assert kv.get(key).status == Status.KEY_NOT_FOUND


def test_a_lock_keeps_others_out_until_it_is_opened_with_its_cas(shared_node: Node) -> None:
    with Peer(shared_node, None) as holder, Peer(shared_node, None) as other:
        key = fresh()
        holder.set(key, b"v")
        locked = holder.ask(Opcode.GET_LOCKED, key, extras=struct.pack(">I", 20))
        assert (locked.status, locked.value) == (0, b"v")
        seen = other.get(key)
        assert (seen.value, seen.cas) == (b"v", 2**64 - 1)
        assert other.ask(Opcode.GET_META, key).cas == 2**64 - 1, "the true one is the key to the lock"
        assert other.set(key, b"w").status == Status.LOCKED
        assert other.delete(key).status == Status.LOCKED
        assert other.ask(Opcode.GET_LOCKED, key).status == Status.LOCKED
        assert other.ask(Opcode.UNLOCK_KEY, key, cas=1).status == Status.LOCKED
        assert holder.ask(Opcode.UNLOCK_KEY, key, cas=locked.cas).status == 0
        assert other.set(key, b"w").status == 0


def test_writes_with_meta_keep_their_revision_and_the_newer_one_wins(kv: Peer) -> None:
    key = fresh()
    extras = struct.pack(">IIQQ", 5, 0, 10, 1 << 40)
    assert kv.ask(Opcode.SET_WITH_META, key, b"far", extras=extras).status == 0
    found = kv.ask(Opcode.GET_META, key)
    assert struct.unpack(">IIIQ", found.extras) == (0, 5, 0, 10)
    assert found.cas == 1 << 40
    older = struct.pack(">IIQQ", 5, 0, 9, 1 << 41)
    assert kv.ask(Opcode.SET_WITH_META, key, b"old", extras=older).status == Status.KEY_EXISTS
    forced = older + struct.pack(">I", 1)
    assert kv.ask(Opcode.SET_WITH_META, key, b"old", extras=forced).status == 0
    gone = struct.pack(">IIQQ", 0, 0, 11, 1 << 42)
    assert kv.ask(Opcode.DELETE_WITH_META, key, extras=gone).status == 0
    meta = kv.ask(Opcode.GET_META, key)
    assert struct.unpack(">IIIQ", meta.extras) == (1, 0, 0, 11)
    assert kv.get(key).status == Status.KEY_NOT_FOUND


@pytest.mark.parametrize(("revision", "cas"), [(2**64 - 1, 1), (1, 2**63), (0, 1), (1, 0)])
def test_meta_that_could_not_count_on_is_refused(kv: Peer, revision: int, cas: int) -> None:
    key = fresh()
    extras = struct.pack(">IIQQ", 0, 0, revision, cas)
    assert kv.ask(Opcode.SET_WITH_META, key, b"v", extras=extras).status == Status.INVALID_ARGUMENTS
    assert kv.set(key, b"v").status == 0


def test_observe_reports_that_an_answered_write_is_on_disk(kv: Peer) -> None:
    key = fresh()
    stored = kv.set(key, b"v", partition=2)
    asked = struct.pack(">HH", 2, len(key)) + key + struct.pack(">HH", 2, 4) + b"none"
    value = kv.ask(Opcode.OBSERVE, value=asked).value
    size = 4 + len(key)
    assert value[:size] == asked[:size]
    assert struct.unpack_from(">BQ", value, size) == (1, stored.cas)
    assert value[size + 9 + 8] == 0x80
    branch = int(kv.stats("vbucket-details 2")["vb_2:branch"])
    kind, partition, current, persisted, high = struct.unpack(
        ">BHQQQ", kv.ask(Opcode.OBSERVE_SEQNO, value=branch.to_bytes(8, "big"), partition=2).value
    )
    assert (kind, partition, current, persisted) == (0, 2, branch, high)
    assert kv.ask(Opcode.OBSERVE_SEQNO, value=bytes(8), partition=2).status == Status.KEY_NOT_FOUND


def test_all_seqnos_lists_each_active_partition_once(kv: Peer) -> None:
    from upper.model.messages import SeqnosAnswer, SeqnosRequest

    kv.set(fresh(), b"v", partition=5)
    kv.send(SeqnosRequest(opaque=9))
    answer = kv.wait_for(SeqnosAnswer)
    assert [partition for partition, _ in answer.seqnos] == list(range(16))
    assert dict(answer.seqnos)[Partition(5)] == int(kv.stats("vbucket-details 5")["vb_5:durable_seqno"])


def test_a_random_key_is_one_that_exists(kv: Peer) -> None:
    kv.set(fresh(), b"v")
    found = kv.ask(Opcode.GET_RANDOM_KEY)
    assert found.status == 0
    assert found.key


def test_a_partition_that_is_not_here_is_answered_with_the_map(kv: Peer) -> None:
    refused = kv.get(b"k", partition=16)
    assert refused.status == Status.NOT_MY_VBUCKET
    content = json.loads(refused.value)
    assert len(content["vBucketServerMap"]["vBucketMap"]) == 16
    assert content["vBucketServerMap"]["serverList"][0].endswith(
        content["nodes"][0]["hostname"].split(":")[1]
    )
    assert json.loads(kv.ask(Opcode.GET_CLUSTER_CONFIG).value) == content


def test_the_error_map_names_every_status_that_the_node_answers(kv: Peer) -> None:
    errors = json.loads(kv.ask(Opcode.GET_ERROR_MAP, value=b"\0\1").value)["errors"]
    known = {int(number, 16) for number in errors}
    assert {int(status) for status in Status if not status.name.startswith("UNKNOWN_0x")} - known <= {0x1F}


def test_keys_and_values_have_their_limits(kv: Peer) -> None:
    assert kv.set(b"k" * 250, b"v").status == 0
    assert kv.set(b"k" * 251, b"v").status == Status.INVALID_ARGUMENTS
    assert kv.set(b"", b"v").status == Status.INVALID_ARGUMENTS
    largest = bytes(20 << 20)
    assert kv.set(b"large", largest).status == 0
    assert kv.get(b"large").value == largest
    assert kv.set(b"large", largest + b"x").status == Status.VALUE_TOO_LARGE
    assert kv.ask(Opcode.APPEND, b"large", b"x").status == Status.VALUE_TOO_LARGE
    assert kv.delete(b"large").status == 0


def test_a_frame_larger_than_allowed_is_refused_and_the_connection_closes(shared_node: Node) -> None:
    with shared_node.connect() as connection:
        connection.sendall(struct.pack(">BBHBBHIIQ", 0x80, 1, 3, 8, 0, 0, 0x7FFFFFFF, 42, 0))
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    assert struct.unpack_from(">BBHBBHIIQ", answer)[5:8:2] == (Status.VALUE_TOO_LARGE, 42)


def test_quiet_commands_are_answered_only_when_they_fail_or_find_something(kv: Peer) -> None:
    from upper.model.messages import Request, Response

    key = fresh()
    for opcode, name, value, extras, opaque in (
        (Opcode.SETQ, key, b"v", bytes(8), 1),
        (Opcode.GETQ, key, b"", b"", 2),
        (Opcode.GETQ, fresh(), b"", b"", 3),
        (Opcode.ADDQ, key, b"v", bytes(8), 4),
        (Opcode.APPENDQ, key, b"w", b"", 5),
        (Opcode.INCREMENTQ, key, b"", bytes(20), 6),
        (Opcode.DELETEQ, key, b"", b"", 7),
        (Opcode.DELETEQ, key, b"", b"", 8),
        (Opcode.NOOP, b"", b"", b"", 9),
    ):
        kv.session.send(Request(opcode=opcode, key=name, value=value, extras=extras, opaque=opaque))
    kv.socket.sendall(kv.session.take_output())
    seen = kv.until(lambda message: getattr(message, "opaque", None) == 9)
    assert [(m.opaque, m.status) for m in seen if isinstance(m, Response)] == [
        (2, 0),
        (4, Status.KEY_EXISTS),
        (6, Status.NOT_A_NUMBER),
        (8, Status.KEY_NOT_FOUND),
        (9, 0),
    ]


def test_answers_keep_the_order_of_their_requests(kv: Peer) -> None:
    from upper.model.messages import Request, Response

    keys = [fresh() for _ in range(200)]
    for number, key in enumerate(keys):
        kv.session.send(
            Request(opcode=Opcode.SET, key=key, value=b"%d" % number, extras=bytes(8), opaque=3 * number)
        )
        kv.session.send(Request(opcode=Opcode.GET, key=key, opaque=3 * number + 1))
        kv.session.send(Request(opcode=Opcode.TOUCH, key=key, extras=bytes(4), opaque=3 * number + 2))
    kv.socket.sendall(kv.session.take_output())
    seen = kv.until(lambda message: getattr(message, "opaque", None) == 3 * len(keys) - 1)
    answers = [message for message in seen if isinstance(message, Response)]
    assert [answer.opaque for answer in answers] == list(range(3 * len(keys)))
    assert [answer.value for answer in answers[1::3]] == [b"%d" % number for number in range(len(keys))]


def test_malformed_requests_are_refused_and_the_connection_goes_on(shared_node: Node) -> None:
    def packet(opcode: int, extras: bytes = b"", key: bytes = b"", value: bytes = b"") -> bytes:
        body = len(extras) + len(key) + len(value)
        head = struct.pack(">BBHBBHIIQ", 0x80, opcode, len(key), len(extras), 0, 0, body, 5, 0)
        return head + extras + key + value

    bad = [
        packet(Opcode.GET, extras=b"1234", key=b"k"),
        packet(Opcode.GET),
        packet(Opcode.GET, key=b"k", value=b"v"),
        packet(Opcode.SET, key=b"k", value=b"v"),
        packet(Opcode.INCREMENT, extras=bytes(8), key=b"k"),
        packet(Opcode.NOOP, key=b"k"),
        packet(Opcode.OBSERVE, value=b"\0\0\0\x09x"),
        packet(Opcode.SET_WITH_META, extras=bytes(24), key=b"k"),
        packet(Opcode.SET_VBUCKET_STATE, extras=b"\x09"),
    ]
    with shared_node.connect() as connection:
        for frame in bad:
            connection.sendall(frame)
            answer = connection.recv(4096)
            assert struct.unpack_from(">H", answer, 6)[0] == Status.INVALID_ARGUMENTS, frame
            assert len(answer) > 24, "a refusal has a reason"
        connection.sendall(packet(0xE7))
        assert struct.unpack_from(">H", connection.recv(4096), 6)[0] == Status.UNKNOWN_COMMAND
        connection.sendall(packet(Opcode.NOOP))
        assert len(connection.recv(4096)) == 24


def test_the_bucket_is_selected_by_its_name(kv: Peer) -> None:
    assert kv.ask(Opcode.SELECT_BUCKET, b"default").status == 0
    assert kv.ask(Opcode.SELECT_BUCKET, b"another").status == Status.KEY_NOT_FOUND


def test_of_flushes_that_are_to_come_the_last_one_counts(node: Node) -> None:
    with Peer(node, None) as peer:
        peer.set(b"k", b"v")
        assert peer.ask(Opcode.FLUSH, extras=(1).to_bytes(4, "big")).status == 0
        assert peer.ask(Opcode.FLUSH, extras=(86400).to_bytes(4, "big")).status == 0
        assert peer.get(b"k").status == 0
        began = int(peer.stats()["time"])
        while int(peer.stats()["time"]) < began + 3:
            assert peer.get(b"k").status == 0
        assert peer.ask(Opcode.FLUSH, extras=(1).to_bytes(4, "big")).status == 0
        while peer.get(b"k").status == 0:
            pass


def test_flush_empties_every_partition_and_seqnos_go_on(node: Node) -> None:
    with Peer(node, None) as peer:
        for number in range(8):
            peer.set(b"k", b"v", partition=number)
        before = int(peer.stats("vbucket-details 3")["vb_3:high_seqno"])
        assert peer.ask(Opcode.FLUSH).status == 0
        assert peer.get(b"k", partition=3).status == Status.KEY_NOT_FOUND
        assert peer.stats()["curr_items"] == "0"
        peer.set(b"k", b"v", partition=3)
        assert int(peer.stats("vbucket-details 3")["vb_3:high_seqno"]) == before + 2
