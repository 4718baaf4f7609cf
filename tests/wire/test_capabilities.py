"""What each dialect can express, as other packages ask for it."""

from __future__ import annotations

import pytest

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
            "streams", "partition_streams", "positions", "snapshot_ends", "stream_flags", "log_in_answer",
            "stops", "settings", "flow_control", "noop", "advances", "states", "replica_acknowledgement",
            "value_datatype", "lock_times", "stored_records",
        },
    ),
    (UPR0, {"streams", "partition_streams", "positions", "snapshot_ends", "lock_times"}),
    (
        TAP,
        {
            "streams", "stream_flags", "states", "state_acknowledgement", "change_acknowledgement",
            "value_datatype",
        },
    ),
    (
        DCP,
        {
            "streams", "partition_streams", "named_connections", "positions", "snapshot_bounds",
            "stream_flags", "log_in_answer", "stops", "settings", "flow_control", "noop", "advances",
            "states", "state_acknowledgement", "value_datatype", "lock_times", "delete_times",
            "shipped_records",
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "expected"), EXPECTED, ids=lambda given: getattr(given, "name", ""))
def test_a_dialect_has_the_capabilities_of_its_specification(dialect: Dialect, expected: set[str]) -> None:
    assert {name for name in Capabilities.__dataclass_fields__ if getattr(dialect, name)} == expected
