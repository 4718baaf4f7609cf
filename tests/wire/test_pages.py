"""The pages about the wire agree with the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wire.samples import PRINTED, Vector
from tools.wire_reference import page
from upper import errors
from upper.wire.session import DIALECTS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_page_equals_the_tables() -> None:
    reported = (
        "docs/reference/wire.md is out of date: python -m tools.wire_reference > docs/reference/wire.md"
    )
    assert (DOCS / "reference" / "wire.md").read_text() == page(), reported


@pytest.mark.parametrize("vector", [v for v in PRINTED if v.why], ids=str)
def test_every_packet_printed_with_wrong_lengths_is_listed_with_its_reason(vector: Vector) -> None:
    line = f"| {vector.dialect.name} | {vector.name} | {vector.document}, line {vector.line} | {vector.why} |"
    assert line in (DOCS / "protocol.md").read_text().splitlines()


def test_every_error_of_a_bad_packet_is_in_the_table_with_its_status() -> None:
    table = (DOCS / "protocol.md").read_text().partition("## Bad packets")[2]
    for error in errors.RemoteProtocolError.__subclasses__():
        lines = [line for line in table.splitlines() if f"| {error.__name__} |" in line]
        assert lines, f"{error.__name__} is not in docs/protocol.md"
        for line in lines:
            assert f"0x{error.status:02x}" in line or "none" in line


def test_every_row_of_every_dialect_is_on_the_reference_page() -> None:
    text = page()
    for dialect in DIALECTS.values():
        for row in dialect.all_rows():
            assert row.name.removesuffix("_response") in text
