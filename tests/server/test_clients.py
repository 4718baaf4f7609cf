"""Clients of other projects work unchanged: memccapable, python-binary-memcached, pylibmc."""

from __future__ import annotations

import shutil
import subprocess

import bmemcached
import pytest

from tests.nodes import Node


@pytest.mark.skipif(shutil.which("memccapable") is None, reason="libmemcached-tools has it")
def test_memccapable_finds_nothing_missing_in_the_binary_protocol(node: Node) -> None:
    command = ("memccapable", "-b", "-t", "20", "-h", "127.0.0.1", "-p", str(node.port))
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "All tests passed" in run.stdout, run.stdout
    assert "[FAIL]" not in run.stdout
    assert run.returncode == 0


def test_python_binary_memcached_works_with_every_command_it_has(shared_node: Node) -> None:
    client = bmemcached.Client((f"127.0.0.1:{shared_node.port}",))
    assert client.set("a", "one", time=1000)
    assert client.get("a") == "one"
    assert not client.add("a", "two")
    assert client.replace("a", {"json": [1, 2]})
    assert client.get("a") == {"json": [1, 2]}
    value, cas = client.gets("a")
    assert value == {"json": [1, 2]}
    assert client.cas("a", "three", cas)
    assert not client.cas("a", "four", cas)
    assert client.set_multi({f"many-{n}": n for n in range(100)}) == []
    assert client.get_multi([f"many-{n}" for n in range(100)]) == {f"many-{n}": n for n in range(100)}
    assert client.delete("a")
    assert client.get("a") is None
    assert client.incr("counter", 5, default=1) == 1
    assert client.incr("counter", 5) == 6
    assert client.decr("counter", 2) == 4
    assert client.delete_multi([f"many-{n}" for n in range(100)])
    assert client.set("large", "x" * 900_000, compress_level=0)
    assert len(client.get("large")) == 900_000
    assert "curr_items" in next(iter(client.stats().values()))
    client.disconnect_all()


def test_python_binary_memcached_logs_in_where_no_login_is_required(shared_node: Node) -> None:
    client = bmemcached.Client((f"127.0.0.1:{shared_node.port}",), "any user", "any password")
    assert client.set("b", "1")
    assert client.get("b") == "1"
    client.disconnect_all()


def test_pylibmc_works_in_binary_mode(shared_node: Node) -> None:
    pylibmc = pytest.importorskip("pylibmc", reason="pylibmc has no wheel for this Python")
    client = pylibmc.Client([f"127.0.0.1:{shared_node.port}"], binary=True, behaviors={"tcp_nodelay": True})
    assert client.set("c", b"one")
    assert client.get("c") == b"one"
    assert not client.add("c", b"two")
    assert client.replace("c", b"two")
    assert client.append("c", b"!")
    assert client.prepend("c", b"!")
    assert client.get("c") == b"!two!"
    assert client.set_multi({f"p{n}": str(n) for n in range(200)}) == []
    assert client.get_multi([f"p{n}" for n in range(200)]) == {f"p{n}": str(n) for n in range(200)}
    assert client.set("n", 10)
    assert client.incr("n", 5) == 15
    assert client.decr("n", 100) == 0
    assert client.delete("c")
    assert client.get("c") is None
    assert client.touch("n", 100)
    client.disconnect_all()
