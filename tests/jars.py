"""JARs that tests use: fetched by Maven into its own repository, by name and version, once."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

REPOSITORY = Path.home() / ".m2" / "repository"
WITHIN = 100.0  # seconds


def jars(*names: str) -> list[Path]:
    """The files of these artifacts (`group:artifact:version`, and a classifier), without what they depend on.

    The test is skipped where Maven is absent or cannot fetch one.
    """
    paths = [_path(name) for name in names]
    if all(path.exists() for path in paths):
        return paths
    if shutil.which("mvn") is None:
        pytest.skip("no Maven here to fetch JARs with")
    REPOSITORY.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory, (REPOSITORY / ".upper-tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one Maven at a time
        (project := Path(directory, "pom.xml")).write_text(_project(names))
        command = ["mvn", "-q", "-B", "-f", str(project), "dependency:resolve"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"Maven did not fetch the JARs within {WITHIN:.0f} s")
    if not all(path.exists() for path in paths):
        pytest.skip(f"Maven cannot fetch the JARs: {done.stdout.strip()[:300]}")
    return paths


def classpath(*names: str) -> list[Path]:
    """The files of these artifacts and of everything that they depend on."""
    listed = REPOSITORY / f".upper-{sha256(' '.join(names).encode()).hexdigest()[:16]}.classpath"
    if listed.exists():
        paths = [Path(path) for path in listed.read_text().split(":")]
        if all(path.exists() for path in paths):
            return paths
    if shutil.which("mvn") is None:
        pytest.skip("no Maven here to fetch JARs with")
    REPOSITORY.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory, (REPOSITORY / ".upper-tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (project := Path(directory, "pom.xml")).write_text(_project(names, transitive=True))
        out = Path(directory, "classpath")
        goal = ["dependency:build-classpath", f"-Dmdep.outputFile={out}"]
        command = ["mvn", "-q", "-B", "-f", str(project), *goal]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=3 * WITHIN, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"Maven did not fetch the JARs within {3 * WITHIN:.0f} s")
        if not out.exists():
            pytest.skip(f"Maven cannot fetch the JARs: {done.stdout.strip()[:300]}")
        listed.write_text(out.read_text())
    return [Path(path) for path in listed.read_text().split(":")]


def _path(name: str) -> Path:
    group, artifact, version, *classifier = name.split(":")
    file = "-".join((artifact, version, *classifier)) + ".jar"
    return REPOSITORY.joinpath(*group.split("."), artifact, version, file)


def _project(names: tuple[str, ...], *, transitive: bool = False) -> str:
    wanted = ""
    alone = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    for name in names:
        group, artifact, version, *classifier = name.split(":")
        wanted += f"""<dependency>
            <groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>
            {"".join(f"<classifier>{each}</classifier>" for each in classifier)}
            {"" if transitive else alone}
        </dependency>"""
    return f"""<project><modelVersion>4.0.0</modelVersion>
        <groupId>tests</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
        <dependencies>{wanted}</dependencies></project>"""
