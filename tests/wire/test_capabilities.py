"""What each dialect can express, as other packages ask for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import upper
from upper.wire.capabilities import Capabilities
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

EXPECTED: list[tuple[Dialect, set[str]]] = [
    (KV, set()),
    (
        UPR,
        {
            "positions", "snapshot_ends", "stream_flags", "log_in_answer", "settings", "flow_control", "noop",
            "advances", "states", "stored_records",
        },
    ),
    (UPR0, {"positions", "snapshot_ends"}),
    (TAP, {"stream_flags", "states", "state_acknowledgement", "change_acknowledgement"}),
    (
        DCP,
        {
            "named_connections", "positions", "snapshot_bounds", "stream_flags", "log_in_answer", "settings",
            "flow_control", "noop", "advances", "states", "state_acknowledgement", "shipped_records",
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "expected"), EXPECTED, ids=lambda given: getattr(given, "name", ""))
def test_a_dialect_has_the_capabilities_of_its_specification(dialect: Dialect, expected: set[str]) -> None:
    assert {name for name in Capabilities.__dataclass_fields__ if getattr(dialect, name)} == expected


@pytest.mark.parametrize("name", Capabilities.__dataclass_fields__)
def test_a_capability_decides_something(name: str) -> None:
    asked = re.compile(rf"dialect(?:\[[^]]*\])*\.{name}\b|DIALECTS\[[^]]*(?:\[[^]]*\])?[^]]*\]\.{name}\b")
    sources = [path for path in Path(upper.__file__).parent.rglob("*.py") if path.name != "capabilities.py"]
    assert any(asked.search(path.read_text()) for path in sources)
