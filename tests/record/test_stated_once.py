"""No module outside `record`, `wire` and `kernel` states where a field of a record is.

The compiled kernel states it in one header, `_layout.h`, which `test_compiled_layout` compares with `record`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper

SOURCE = Path(upper.__file__).parent
HOMES = {"record", "wire", "kernel"}
RECORDS = {"record", "entry", "packet", "payload", "old"}  # what the source calls a record
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in HOMES)


def offsets(text: str) -> Iterator[str]:
    """Every subscript of a record by a number above 0."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in RECORDS:
            numbers = [part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant)]
            if any(isinstance(number, int) and number > 0 for number in numbers):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_reads_records_by_the_names_of_their_offsets(path: Path) -> None:
    assert list(offsets(path.read_text())) == []


@pytest.mark.parametrize("text", ["record[1]", "entry[16:24]", "packet[at + 6]", "record[24 + size :]"])
def test_an_offset_is_found_however_it_is_written(text: str) -> None:
    assert len(list(offsets(text))) == 1


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in {"record", "wire"}],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_the_header_of_a_packet_is_declared_in_record_and_wire_alone(path: Path) -> None:
    """Magic, opcode and key length begin every packet: `>BBH`, or `>xBH` with bytes left out."""
    assert re.findall(r'Struct\(">[Bx][Bx]H[^"]*"', path.read_text()) == []


COMPILED = sorted(path for path in (SOURCE / "kernel").iterdir() if path.suffix in (".h", ".pxi", ".pyx"))
OFFSET_IN_C = re.compile(
    r"(?<!fetch_soon\()\b(?:c|cell|copy|record)(?:\[[1-9]| \+ [1-9])"  # what the C code calls a record
)


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.name)
def test_the_compiled_kernel_reads_records_by_the_names_of_their_offsets(path: Path) -> None:
    assert OFFSET_IN_C.findall(path.read_text()) == []


@pytest.mark.parametrize("text", ["c[1] = CELL_COLD;", "get32(c + 8)", "put32(record + 12, 0)"])
def test_an_offset_is_found_in_c(text: str) -> None:
    assert OFFSET_IN_C.search(text)
