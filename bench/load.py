"""Processes for the benchmarks of a node: a load generator in C, nodes, and memcached.

`loadgen.c` is built into `out/` if it is newer than its program. Nodes store their data under `out/` too,
because `/tmp` may be in memory, where durable writes cost nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import Absent
from tests.nodes import Node

HERE = Path(__file__).parent
OUT = HERE.parent / "out"
KERNELS = ("compiled", "plain")


def program() -> Path:
    """The load generator, built if need be."""
    source, built = HERE / "loadgen.c", OUT / "loadgen"
    if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
        compiler = shutil.which("cc")
        if compiler is None:
            raise Absent("the load generator needs a C compiler; install one, as `cc`")
        OUT.mkdir(exist_ok=True)
        subprocess.run([compiler, "-O2", "-pthread", "-o", str(built), str(source)], check=True)
    return built


def load(verb: str, port: int = 0, **options: float) -> dict[str, Any]:
    """Run the load generator; options are its letters. The last line of what it prints."""
    words = [word for letter, value in options.items() for word in (f"-{letter}", f"{value:.12g}")]
    done = subprocess.run(
        [str(program()), verb, "-p", str(port), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise ChildProcessError(f"loadgen {verb} {' '.join(words)}: {done.stderr or done.stdout}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def cpu(pid: int, *, waits: bool = False) -> float:
    """Seconds on a core that a process has had so far, threads included; `waits`: and in line for one."""
    try:
        # To the nanosecond, but without threads that have ended; a node's threads stay.
        tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(sum(map(int, task.read_text().split()[: 1 + waits])) for task in tasks) / 1e9
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory on the disk of the project, gone afterwards."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT, prefix="bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def node(*options: str, partitions: int = 1024, kernel: str = "compiled") -> Iterator[Node]:
    """A node on an empty directory."""
    env = {"UPPER_KERNEL": "plain"} if kernel == "plain" else {}
    with (
        scratch() as directory,
        Node(directory / "data", *options, partitions=partitions, env=env) as running,
    ):
        if running.ready["kernel"] != kernel:
            raise Absent(f"the {kernel} kernel is not built; run `make kernel`")
        yield running


@contextmanager
def memcached() -> Iterator[tuple[int, int] | None]:
    """memcached with one thread: its port and process; None where it is not installed."""
    found = shutil.which("memcached")
    if found is None:
        yield None
        return
    port = free_port()
    user = ["-u", "root"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [found, "-t", "1", "-m", "2048", "-l", "127.0.0.1", "-p", str(port), "-U", "0", *user]
    )
    try:
        wait_for(port)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def redis() -> Iterator[tuple[int, int] | None]:
    """Redis that syncs its log before it answers a write: port and process; None where it is absent."""
    found = shutil.which("redis-server")
    if found is None or shutil.which("redis-benchmark") is None:
        yield None
        return
    with scratch() as directory:
        port = free_port()
        options = {
            "port": str(port), "bind": "127.0.0.1", "dir": str(directory), "save": "",
            "appendonly": "yes", "appendfsync": "always", "auto-aof-rewrite-percentage": "0",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        process = subprocess.Popen([found, *words], stdout=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(30)


def ask_redis(verb: str, port: int, *, connections: int, depth: int, count: int, keys: int) -> float:
    """SET or GET by Redis's own load generator, of `keys` keys, values of 100 bytes; requests a second."""
    done = subprocess.run(
        ["redis-benchmark", "-p", str(port), "-t", verb, "-n", str(count), "-c", str(connections),
         "-P", str(depth), "-d", "100", "-r", str(keys), "--csv"],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return float(done.stdout.splitlines()[-1].split(",")[1].strip('"'))


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has in use."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise Absent("the system does not report how much memory a process uses")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(port: int, *, within: float = 10.0) -> None:
    """Wait until the port accepts connections."""
    deadline = time.monotonic() + within
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
