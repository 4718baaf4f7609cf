"""Couchbase's Java clients, unchanged: the one for DCP, which is under the connectors for Kafka and others,
and the one for documents, which asks the REST port whether the bucket is ready.

The programs are in `java_clients/`. The client for DCP matches answers to requests by their order, and
refuses changes outside their snapshot.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.jars import jars
from tests.nodes import Node
from upper.server.auth import Role, User, Users, save_users

SOURCES = Path(__file__).parent / "java_clients"
PASSWORD = "a secret"
JARS = (
    "com.couchbase.client:dcp-client:0.56.0",
    "com.couchbase.client:java-client:3.9.2",
    "com.couchbase.client:core-io:3.9.2",
    "io.projectreactor:reactor-core:3.6.9",
    "org.reactivestreams:reactive-streams:1.0.4",
    "org.slf4j:slf4j-api:1.7.36",
    "io.micrometer:micrometer-core:1.10.5",
    "io.micrometer:micrometer-commons:1.10.5",
    "io.micrometer:micrometer-observation:1.10.5",
    "org.hdrhistogram:HdrHistogram:2.1.12",
    "org.latencyutils:LatencyUtils:2.0.3",
    "org.jspecify:jspecify:1.0.0",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("javac") is None, reason="javac is absent; it compiles the programs"),
]


@pytest.fixture(scope="module")
def classpath(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The clients, and the programs over them."""
    made = tmp_path_factory.mktemp("classes")
    path = ":".join([str(made), *map(str, jars(*JARS))])
    sources = map(str, sorted(SOURCES.glob("*.java")))
    subprocess.run(["javac", "-cp", path, "-d", str(made), *sources], check=True, timeout=200)
    return path


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("java")
    save_users(home / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    options = ("--users", str(home / "users.json"), "--rest-port", "0")
    with Node(home / "data", *options, partitions=1024) as running:
        yield running


def run(classpath: str, program: str, *arguments: object) -> dict[str, Any]:
    """What the program prints."""
    command = ["java", "-cp", classpath, program, *map(str, arguments), "ann", PASSWORD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_change_arrives_once_in_order_for_every_partition(node: Node, classpath: str) -> None:
    with upper.connect(node.url.replace("upr://", "upr://ann@"), password=PASSWORD) as bucket:
        bucket.set_many((f"k{n}", "a value of some length, in JSON or not") for n in range(50_000))
        bucket.delete_many(f"k{n}" for n in range(100))
    assert run(classpath, "Consumer", f"127.0.0.1:{node.port}") == {
        "partitions": 1024, "mutations": 49_900, "deletions": 100, "keys": 50_000, "faults": 0, "done": True,
    }  # fmt: skip


def test_the_client_for_documents_becomes_ready_over_rest(node: Node, classpath: str) -> None:
    found = run(classpath, "Documents", node.port, node.ready["rest_port"])
    assert found == {"sum": sum(range(200)), "exists": False}
