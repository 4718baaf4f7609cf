"""A real etcd for tests: one member, on free ports of the loopback interface, in a directory of its own.

`SecuredEtcd` has TLS, requires client certificates and a login, and lets the user `upper` use the keys of the
clusters whose names begin with `one`.
"""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from base64 import b64encode
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from tests.server.certificate import made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Etcd:
    scheme = "http"
    tls: ssl.SSLContext | None = None
    options: tuple[str, ...] = ()

    def __init__(self, directory: Path) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed (Debian: etcd-server)")
        self._program, self._directory = program, directory
        self.port, self._peer = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        client, peer = f"{self.scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer}"
        self._process = subprocess.Popen(
            [
                self._program, "--name", "one", "--data-dir", str(self._directory),
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"one={peer}", "--logger", "zap", "--log-level", "error",
                *self.options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ends = time.monotonic() + 30
        while not self._healthy():
            assert self._process.poll() is None, "etcd ended at once"
            assert time.monotonic() < ends, "etcd does not become healthy"
            time.sleep(0.05)

    def _healthy(self) -> bool:
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        if self.tls is None:
            return HTTPConnection("127.0.0.1", self.port, timeout=5)
        return HTTPSConnection("127.0.0.1", self.port, timeout=5, context=self.tls)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


class SecuredEtcd(Etcd):
    scheme = "https"
    user, password = "upper", "correct horse"

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # etcd's gateway refuses a client certificate with a common name once logins are required.
        self.certificate, self.key = made(directory, subject="/O=upper")
        self.tls = ssl.create_default_context(cafile=str(self.certificate))
        self.tls.load_cert_chain(self.certificate, self.key)
        self.options = (
            "--cert-file", str(self.certificate), "--key-file", str(self.key),
            "--client-cert-auth", "--trusted-ca-file", str(self.certificate),
        )  # fmt: skip
        super().__init__(directory / "data")
        for name, role, password in (("root", "root", "root's"), (self.user, "clusters", self.password)):
            self.ask("user/add", name=name, password=password)
            self.ask("role/add", name=role)
            self.ask("user/grant", user=name, role=role)
        keys = {"key": _text("/upper/one"), "range_end": _text("/upper/onf")}
        self.ask("role/grant", name="clusters", perm={"permType": "READWRITE", **keys})
        self.ask("auth/enable")

    def ask(self, path: str, *, token: str = "", **message: Any) -> dict[str, Any]:
        """A request for etcd's users; `path` without auth/ at its beginning."""
        connection = self._connection()
        headers = {"Authorization": token} if token else {}
        path = f"/v3/auth/{path.removeprefix('auth/')}"
        connection.request("POST", path, json.dumps(message), headers)
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, (path, body)
        connection.close()
        return body

    def change_password(self, password: str) -> None:
        """Ends every token of the user."""
        token = self.ask("authenticate", name="root", password="root's")["token"]
        self.ask("user/changepw", token=token, name=self.user, password=password)


def _text(key: str) -> str:
    return b64encode(key.encode()).decode()
