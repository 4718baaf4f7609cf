"""A real node in a process of its own, for tests of anything that connects to one.

`Node` starts `upper serve` on a free port in a directory of the caller's, reads the ready line, and can be
stopped (SIGTERM), killed (SIGKILL) and started again on the same data and the same port. Nothing is
simulated: what a test sees through it is what a user sees.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self


class Node:
    """One `upper serve` process. Use it as a context manager, or call `stop` yourself."""

    def __init__(
        self,
        data: Path,
        *options: str,
        partitions: int = 16,
        port: int = 0,
        env: dict[str, str] | None = None,
        file_limit: int | None = None,
        open_files: int | None = None,
        plain_clients: str = "partition-0",
    ) -> None:
        self.data = data
        self.options = options
        self.partitions = partitions
        self.port = port
        self.env = env or {}
        self.file_limit = file_limit  # bytes; the disk refuses to make any file larger
        self.open_files = open_files  # that the process may have at a time
        self.plain_clients = plain_clients  # test peers name partition 0 without having named another
        self.ready: dict[str, object] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    def start(self, *, within: float = 60.0) -> Self:
        """Start the process and wait until it prints that it is ready."""
        assert self._process is None, "the node is running"
        self._log = (self.data.parent / f"{self.data.name}.log").open("ab")
        self._process = subprocess.Popen(
            self._command(),
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self.env},
            preexec_fn=None if self.file_limit is self.open_files is None else self._limit,
        )
        line = self._first_line(time.monotonic() + within)
        self.ready = json.loads(line)
        port = self.ready["port"]
        assert isinstance(port, int)
        self.port = port
        return self

    def stop(self, *, within: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        return self._end(signal.SIGTERM, within)

    def kill(self) -> None:
        """SIGKILL: what a power cut does to the process."""
        self._end(signal.SIGKILL, 30.0)

    def restart(self) -> Self:
        """Start again on the same data and the same port, after `stop` or `kill`."""
        return self.start()

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._end(signal.SIGTERM, 30.0)

    # ── What tests ask of it ──────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        return f"upr://127.0.0.1:{self.port}/default"

    @property
    def metrics_port(self) -> int:
        port = self.ready["metrics_port"]
        assert isinstance(port, int)
        return port

    @property
    def pid(self) -> int:
        assert self._process is not None, "the node is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the process wrote to its standard error, over all its lives."""
        return (self.data.parent / f"{self.data.name}.log").read_text()

    def memory(self) -> int:
        """Resident bytes of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def connect(self, *, timeout: float = 10.0) -> socket.socket:
        """A bare TCP connection to the node."""
        connection = socket.create_connection(self.address, timeout=timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    # ── Inside ────────────────────────────────────────────────────────────────────────────────────

    def _command(self) -> Sequence[str]:
        return (
            *(sys.executable, "-m", "upper", "serve", "--json", "--data", str(self.data)),
            *("--port", str(self.port), "--partitions", str(self.partitions)),
            *("--plain-clients", self.plain_clients, *self.options),
        )

    def _limit(self) -> None:
        for kind, limit in (
            (resource.RLIMIT_FSIZE, self.file_limit),
            (resource.RLIMIT_NOFILE, self.open_files),
        ):
            if limit is not None:
                resource.setrlimit(kind, (limit, limit))

    def _first_line(self, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise TimeoutError(f"the node was not ready in time; it printed:\n{self.log}")
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    code = self._end(signal.SIGKILL, 30.0)
                    raise ChildProcessError(
                        f"the node ended with code {code} before it was ready:\n{self.log}"
                    )
                line += piece
        return line

    def _end(self, by: signal.Signals, within: float) -> int:
        process, self._process = self._process, None
        assert process is not None, "the node is not running"
        if process.poll() is None:
            process.send_signal(by)
        try:
            code = process.wait(within)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
            if self._log is not None:
                self._log.close()
        return code
