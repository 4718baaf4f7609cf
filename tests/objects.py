"""A real S3 server for tests: s3proxy's published JAR, in memory, on a free port.

Version 4.1 is the first whose conditional puts have one winner under races; moto and older ones have several.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jars import jars

JAR = "org.gaul:s3proxy:4.1.0:jar-with-dependencies"
KEY, SECRET = "AKIDTESTS", "a-secret-of-the-tests"
BUCKET = "lakes"
SETTINGS = """
s3proxy.endpoint=http://127.0.0.1:{port}
s3proxy.authorization=aws-v2-or-v4
s3proxy.identity={key}
s3proxy.credential={secret}
jclouds.provider=transient-nio2
jclouds.identity=unused
jclouds.credential=unused
"""


@contextmanager
def object_store(directory: Path) -> Iterator[dict[str, str]]:
    """Run the server, with an empty bucket; what its clients need in their environment."""
    (jar,) = jars(JAR)
    port = _free_port()
    (settings := directory / "s3proxy.conf").write_text(SETTINGS.format(port=port, key=KEY, secret=SECRET))
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }
    from upper.spark import java

    command = [str(java.find(os.environ) / "bin" / "java"), "-Xmx512m", "-jar", str(jar)]
    with (directory / "s3proxy.log").open("wb") as log:
        server = subprocess.Popen([*command, "--properties", str(settings)], stdout=log, stderr=log)
    try:
        _wait(server, port, directory / "s3proxy.log")
        _make_bucket(environment)
        yield environment
    finally:
        server.terminate()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"s3proxy does not start: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.05)


def _make_bucket(environment: dict[str, str]) -> None:
    import pyarrow.fs as fs

    fs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        region=environment["AWS_REGION"],
        endpoint_override=environment["AWS_ENDPOINT_URL"],
        allow_bucket_creation=True,
    ).create_dir(BUCKET)
