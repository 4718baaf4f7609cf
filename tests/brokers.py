"""A real Kafka broker for tests: one process in KRaft mode, from its published JARs, on free ports."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jars import classpath

KAFKA = "org.apache.kafka:kafka_2.13:4.0.0"
CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={logs}
num.partitions=4
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
"""


@contextmanager
def kafka(directory: Path) -> Iterator[str]:
    """Run a broker; its address."""
    from upper.spark import java

    path = ":".join(map(str, classpath(KAFKA)))
    port, controller = free_port(), free_port()
    (settings := directory / "kafka.properties").write_text(
        SETTINGS.format(port=port, controller=controller, logs=directory / "kafka")
    )
    program = [str(java.find(os.environ) / "bin" / "java"), "-Xmx512m", "-cp", path]
    form = [*program, "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(settings)]
    done = subprocess.run(form, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.fail(f"Kafka's storage cannot be formatted: {done.stdout[-500:]}{done.stderr[-500:]}")
    log_path = directory / "kafka.log"
    with log_path.open("wb") as log:
        broker = subprocess.Popen([*program, "kafka.Kafka", str(settings)], stdout=log, stderr=log)
    try:
        wait_for(broker, port, log_path)
        yield f"127.0.0.1:{port}"
    finally:
        broker.terminate()
        broker.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path, within: float = 180.0) -> None:
    deadline = time.monotonic() + within
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"it does not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
