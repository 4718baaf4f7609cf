"""Object stores for tests, in memory, on a free port: s3proxy, Azurite for Azure, fake-gcs-server for Google.

Version 4.1 of s3proxy is the first whose conditional puts have one winner under races; moto and older ones
have several. Azurite has one too, and so has fake-gcs-server behind the program in `gcs_server`.
"""

from __future__ import annotations

import base64
import fcntl
import hmac
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.jars import jars

JAR = "org.gaul:s3proxy:4.1.0:jar-with-dependencies"
KEY, SECRET = "AKIDTESTS", "a-secret-of-the-tests"
BUCKET = "lakes"
GCS = Path(__file__).parent / "apps" / "gcs_server"
AZURITE_VERSION = "3.35.0"
# The account that every Azurite has, as its documentation lists it.
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
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


@contextmanager
def azure_store(directory: Path) -> Iterator[dict[str, str]]:
    """Run Azurite, with an empty container; what its clients need in their environment."""
    import pyarrow.fs as fs

    from upper.apps.lake.store import azure_hosts

    program, port = _azurite(), _free_port()
    # Arrow's library sends a newer version of the interface than Azurite names.
    options = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    log = directory / "azurite.log"
    with log.open("wb") as out:
        command = [str(program), *options, "--blobPort", str(port)]
        server = subprocess.Popen(command, cwd=directory, stdout=out, stderr=out)
    environment = {
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}",
        # For Delta's library: Azurite cannot list from a name on, as Azure can.
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
    }
    try:
        _wait(server, port, log)
        hosts = azure_hosts("", environment["AZURE_STORAGE_ENDPOINT"])
        fs.AzureFileSystem(AZURITE_ACCOUNT, account_key=AZURITE_KEY, **hosts).create_dir(BUCKET)
        yield environment
    finally:
        server.terminate()
        server.wait(30)


def azure_token() -> str:
    """A SAS token of Azurite's account: the signature of everything that it permits, until a day."""
    fields = {
        "sp": "rwdlac", "ss": "b", "srt": "sco", "st": "", "se": "2099-01-01T00:00:00Z", "sip": "", "spr": "",
        "sv": "2020-12-06", "ses": "",
    }  # fmt: skip
    text = "".join(f"{each}\n" for each in (AZURITE_ACCOUNT, *fields.values()))
    signed = hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), "sha256")
    given = {name: value for name, value in fields.items() if value}
    return urlencode(given | {"sig": base64.b64encode(signed).decode()})


@contextmanager
def google_store(directory: Path) -> Iterator[dict[str, str]]:
    """Run fake-gcs-server, with an empty bucket; what its clients need in their environment."""
    program, address = directory / "gcs", f"127.0.0.1:{_free_port()}"
    if shutil.which("go") is None:
        pytest.skip("no Go here to build fake-gcs-server with")
    build = ["go", "build", "-o", str(program), "."]
    made = subprocess.run(build, cwd=GCS, capture_output=True, text=True, timeout=600, check=False)
    if made.returncode:
        pytest.skip(f"fake-gcs-server could not be fetched or built: {made.stderr.strip()[-200:]}")
    log = directory / "gcs.log"
    with log.open("wb") as out:
        command = [str(program), "-address", address, "-bucket", BUCKET]
        server = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        _wait(server, int(address.rpartition(":")[2]), log)
        yield {"STORAGE_EMULATOR_HOST": f"http://{address}"}
    finally:
        server.terminate()
        server.wait(30)


def _azurite() -> Path:
    """Its program, fetched by npm once. The test is skipped where npm is absent or cannot fetch it."""
    home = Path.home() / ".cache" / "upper-tests" / f"azurite-{AZURITE_VERSION}"
    program = home / "node_modules" / ".bin" / "azurite-blob"
    if shutil.which("npm") is None:
        pytest.skip("no npm here to fetch Azurite with")
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            command = ["npm", "install", "--no-audit", "--no-fund", f"azurite@{AZURITE_VERSION}"]
            try:
                subprocess.run(command, cwd=home, capture_output=True, timeout=240, check=True)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                pytest.skip(f"npm cannot fetch Azurite: {error}")
    return program


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
                pytest.fail(f"{log.stem} does not start: {log.read_text(errors='replace')[-1000:]}")
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
