"""A real OpenSearch node for tests, from its published JARs, on free ports.

The distribution is not among them, so `apps/search_node/SearchNode.java` starts a node with the modules that
an index needs. Eclipse's compiler, a JAR too, compiles it: a Java runtime has none of its own.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from tests.brokers import free_port, wait_for
from tests.jars import classpath, jars

VERSION = "2.19.1"
OPENSEARCH = (
    f"org.opensearch:opensearch:{VERSION}",
    f"org.opensearch.plugin:transport-netty4-client:{VERSION}",
    f"org.opensearch.plugin:reindex-client:{VERSION}",
    f"org.opensearch.plugin:lang-painless:{VERSION}",
    f"org.opensearch.plugin:mapper-extras-client:{VERSION}",
    "org.apache.logging.log4j:log4j-core:2.21.0",
)
COMPILER = "org.eclipse.jdt:ecj:3.39.0"
PROGRAM = Path(__file__).parent / "apps" / "search_node" / "SearchNode.java"


@contextmanager
def opensearch(directory: Path) -> Iterator[str]:
    """Run a node; its address. Requests have up to 10 MB; snapshots are in `directory`/snapshots."""
    from upper.spark import java

    path = ":".join(map(str, classpath(*OPENSEARCH)))
    program = [str(java.find(os.environ) / "bin" / "java")]
    classes, log_path = directory / "classes", directory / "opensearch.log"
    compiler = [*program, "-jar", str(*jars(COMPILER)), "-nowarn", "-source", "17", "-target", "17"]
    compiler += ["-cp", path, "-d", str(classes), str(PROGRAM)]
    done = subprocess.run(compiler, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.fail(f"{PROGRAM.name} cannot be compiled: {done.stdout[-500:]}{done.stderr[-1500:]}")
    port = free_port()
    program += ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{classes}:{path}", "SearchNode"]
    with log_path.open("wb") as log:
        node = subprocess.Popen([*program, str(directory), str(port)], stdout=log, stderr=log)
    try:
        wait_for(node, port, log_path)
        wait_for_answer(port, log_path)
        yield f"127.0.0.1:{port}"
    finally:
        node.terminate()
        node.wait(60)


def wait_for_answer(port: int, log: Path, within: float = 180.0) -> None:
    deadline = time.monotonic() + within
    while True:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/_cluster/health?wait_for_status=yellow")
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            pass
        if time.monotonic() > deadline:
            pytest.fail(f"it does not answer: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
