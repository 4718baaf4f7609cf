"""Key-value calls against a real node."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import upper
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.client.calls import Copy
from upper.client.commands import portions
from upper.client.copies import MAX_IN_FLIGHT, MAX_REQUESTS
from upper.errors import (
    BucketClosed,
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    Locked,
    NotANumber,
    NotStored,
    Refused,
    TimedOut,
    Unreachable,
    ValueTooLarge,
)
from upper.model.values import Cas


def test_what_is_stored_comes_back_with_its_flags(bucket: Bucket) -> None:
    stored = bucket.set("a", b"\x00\xff", flags=7)
    item = bucket.get(b"a")
    assert (item.value, item.flags, item.cas) == (b"\x00\xff", 7, stored.cas)


def test_a_write_returns_its_place_in_the_history(bucket: Bucket) -> None:
    stored = bucket.set("a", "x")
    partition = bucket.partition_of("a")
    assert stored.seqno == bucket.seqnos()[partition]
    assert stored.branch == bucket.failover_log(partition).branch


def test_each_refusal_has_its_exception_and_a_sentence(bucket: Bucket) -> None:
    bucket.set("a", "text")
    item = bucket.get("a")
    bucket.set("a", "other")
    with pytest.raises(KeyNotFound):
        bucket.get("none")
    with pytest.raises(KeyNotFound):
        bucket.delete("none")
    with pytest.raises(KeyExists):
        bucket.set("a", "x", cas=item.cas)
    with pytest.raises(KeyExists):
        bucket.add("a", "x")
    with pytest.raises(KeyNotFound):
        bucket.replace("none", "x")
    with pytest.raises(NotANumber):
        bucket.incr("a")
    with pytest.raises((NotStored, KeyNotFound)):
        bucket.append("none", "x")
    with pytest.raises(ValueTooLarge):
        bucket.set("big", bytes(21 * 2**20))
    with pytest.raises((InvalidArguments, Refused)):
        bucket.set("k" * 251, "x")
    assert bucket.get("a").value == b"other", "the connection goes on after each of them"


def test_what_fits_into_no_packet_is_refused_with_a_sentence(bucket: Bucket) -> None:
    for call in (
        lambda: bucket.set("a", "x", expiry=-1),
        lambda: bucket.set("a", "x", flags=2**32),
        lambda: bucket.set("a", "x", cas=-1),
        lambda: bucket.set_many({"a": "x"}, expiry=2**40),
        lambda: bucket.get("k" * 70_000),
        lambda: bucket.get_many(["k" * 70_000]),
        lambda: bucket.incr("a", -1),
        lambda: bucket.failover_log(16),
        lambda: bucket.promote(-1),
        lambda: upper.connect("upr://127.0.0.1", timeout=0),
    ):
        with pytest.raises(InvalidArguments):
            call()
    for value in (5, None, ["x"]):
        with pytest.raises(TypeError, match="str or bytes"):
            bucket.set("a", value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="str or bytes"):
            bucket.set_many({"a": value})  # type: ignore[arg-type]
    assert bucket.get_many(["a"]) == {}


def test_many_are_pipelined_and_missing_ones_are_left_out(bucket: Bucket) -> None:
    stored = bucket.set_many((f"k{n}", f"v{n}") for n in range(10_000))
    assert len(stored) == 10_000
    found = bucket.get_many([*(f"k{n}" for n in range(10_000)), "none"])
    assert len(found) == 10_000
    assert found["k77"].value == b"v77"
    assert bucket.delete_many(["k1", "k2", "none"]) == 2
    assert len(bucket.get_many(["k1", "k2", "k3"])) == 1


def test_large_values_in_bulk_do_not_stop_either_side(bucket: Bucket) -> None:
    """Answers that fill every buffer on the way, to requests that are still being sent."""
    bucket.set_many({f"big{n}": bytes(512 * 1024) for n in range(40)})
    found = bucket.get_many(f"big{n % 40}" for n in range(200))
    assert sum(len(item.value) for item in found.values()) == 40 * 512 * 1024


@given(st.lists(st.integers(0, 3 * MAX_IN_FLIGHT), max_size=50), st.integers(0, 9000))
def test_portions_keep_the_order_and_are_neither_too_many_nor_too_heavy(sizes: list[int], more: int) -> None:
    items = sizes + [1] * more
    cut = list(portions(items, lambda size: size))
    assert [size for some in cut for size in some] == items
    assert all(len(some) <= MAX_REQUESTS and sum(some[:-1]) < MAX_IN_FLIGHT for some in cut)


def test_counters_count(bucket: Bucket) -> None:
    with pytest.raises(KeyNotFound):
        bucket.incr("n")
    assert bucket.incr("n", initial=10) == 10
    assert bucket.incr("n", 5) == 15
    assert bucket.decr("n", 100) == 0


def test_appending_and_touching_change_what_is_there(bucket: Bucket) -> None:
    bucket.set("a", "b", expiry=1000)
    bucket.append("a", "c")
    bucket.prepend("a", "a")
    assert bucket.get("a").value == b"abc"
    bucket.touch("a", 0)
    assert bucket.get_and_touch("a", 500).value == b"abc"


def test_a_locked_key_is_written_only_with_its_cas(bucket: Bucket) -> None:
    bucket.set("a", "1")
    held = bucket.get_and_lock("a", 30)
    with pytest.raises((Locked, KeyExists)):
        bucket.set("a", "2")
    bucket.unlock("a", held.cas)
    bucket.set("a", "2")
    held = bucket.get_and_lock("a", 30)
    bucket.set("a", "3", cas=held.cas)
    assert bucket.get("a").value == b"3"


def test_copies_keep_their_history_and_twice_is_once(bucket: Bucket) -> None:
    copy = Copy(key=b"c", value=b"v", revision=9, cas=Cas(5 << 20), flags=3)
    assert bucket.copy_many([copy]) == [True]
    assert bucket.copy_many([copy]) == [False]
    item = bucket.get("c")
    assert (item.value, item.cas, item.flags) == (b"v", 5 << 20, 3)
    older = Copy(key=b"c", value=b"old", revision=8, cas=Cas(9 << 20))
    assert bucket.copy_many([older]) == [False]
    assert bucket.copy_many([older], force=True) == [True]
    assert bucket.get("c").value == b"old"
    gone = Copy(key=b"c", value=None, revision=20, cas=Cas(7 << 20))
    assert bucket.copy_many([gone, gone]) == [True, False]
    with pytest.raises(KeyNotFound):
        bucket.get("c")


def test_several_threads_may_share_a_bucket(bucket: Bucket) -> None:
    def work(number: int) -> None:
        for n in range(50):
            bucket.set(f"t{number}", str(n))
            assert bucket.get(f"t{number}").value == str(n).encode()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bucket.get_many(f"t{n}" for n in range(4))) == 4


def test_a_restarted_node_is_found_again(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set("a", "1")
        node.stop()
        node.restart()
        assert bucket.get("a").value == b"1"
        bucket.delete("a")
        node.kill()
        node.restart()
        bucket.set_many([("b", "2")])
        assert bucket.get("b").value == b"2"


def test_a_call_waits_for_a_node_that_comes_back_in_time(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        node.stop()
        thread = threading.Thread(target=node.restart)
        thread.start()
        bucket.set("a", "1")
        thread.join()
        assert bucket.get("a").value == b"1"


def test_an_answer_that_comes_after_ctrl_c_reaches_no_other_call(node: Node) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with upper.connect(node.url, timeout=30) as bucket:
        bucket.set_many({"a": "of a", "b": "of b"})
        before = signal.signal(signal.SIGALRM, interrupt)
        os.kill(node.pid, signal.SIGSTOP)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                bucket.get("a")
            found: list[bytes] = []
            thread = threading.Thread(target=lambda: found.append(bucket.get("b").value))
            thread.start()
            thread.join(0.2)  # what it asks is on its way before the first answer is
        finally:
            signal.signal(signal.SIGALRM, before)
            os.kill(node.pid, signal.SIGCONT)
        thread.join(30)
        assert found == [b"of b"]


def test_a_bucket_closed_during_a_call_leaves_its_socket_to_the_call(node: Node) -> None:
    """A number of a file that is free too early is that of the next file, and the call would read from it."""
    outcome: list[upper.UpperError] = []
    bucket = upper.connect(node.url, timeout=30)
    bucket.set("a", "1")
    bucket.get("a")

    def call() -> None:
        with pytest.raises(upper.UpperError) as error:
            bucket.get("a")
        outcome.append(error.value)

    os.kill(node.pid, signal.SIGSTOP)
    thread = threading.Thread(target=call)
    pairs: list[tuple[socket.socket, socket.socket]] = []
    try:
        thread.start()
        thread.join(0.2)  # it waits for the answer by then; before or after, the outcome is the same
        bucket.close()
        pairs = [socket.socketpair() for _ in range(4)]
        for one, other in pairs:
            one.sendall(b"of others")
            other.sendall(b"of others")
    finally:
        os.kill(node.pid, signal.SIGCONT)
    thread.join()
    assert [type(error) for error in outcome] == [BucketClosed]
    for each in (one for pair in pairs for one in pair):
        each.setblocking(False)
        assert each.recv(100) == b"of others"
        each.close()


def test_a_closed_port_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:\d+ cannot be reached"):
        upper.connect(f"upr://127.0.0.1:{port}")
    assert time.monotonic() - began < 5


def test_the_second_host_is_tried_where_the_first_is_gone(shared_node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with upper.connect(f"upr://127.0.0.1:{port},127.0.0.1:{shared_node.port}/default") as bucket:
        assert bucket.partitions == 16


def test_a_silent_peer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TimedOut, match="did not respond"):
            upper.connect(f"upr://127.0.0.1:{port}", timeout=0.3)


def test_a_server_of_another_protocol_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(upper.UpperError, match="not a node"):
            upper.connect(f"upr://127.0.0.1:{port}", timeout=5)
        thread.join()


def test_a_bucket_that_is_not_there_is_named(shared_node: Node) -> None:
    with pytest.raises(Refused, match="nonsense"):
        upper.connect(f"upr://127.0.0.1:{shared_node.port}/nonsense")
