"""STAT: a group of statistics, one answer a row, and an empty one at the end."""

from __future__ import annotations

from upper.server import stats
from upper.server.auth import Role
from upper.server.table import Call, Reply, handles
from upper.wire.codes import Opcode


@handles(Opcode.STAT, role=Role.READ, large=True)
def stat(call: Call) -> list[Reply]:
    rows = stats.group(call.node, call.key.decode(errors="replace"))
    return [*(Reply(key=name.encode(), value=value.encode()) for name, value in rows), Reply()]
