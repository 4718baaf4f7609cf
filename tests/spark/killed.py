"""`upper`, killed at an exact moment: `python -m tests.spark.killed before|after TABLE sync ...`.

Not a copy of anything: the commit of a lake's table is wrapped, and the process and all that it has started
get SIGKILL right before, or right after, the first commit of that table.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from upper.apps.lake.tables import LakeTable
from upper.cli.main import main

WHEN, TABLE = sys.argv[1:3]
commit = LakeTable.commit


def and_die(table: LakeTable, **what: Any) -> None:
    if table.name == TABLE and WHEN == "before":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    commit(table, **what)
    if table.name == TABLE:
        os.killpg(os.getpgrp(), signal.SIGKILL)


LakeTable.commit = and_die  # type: ignore[assignment,method-assign]
sys.exit(main(sys.argv[3:]))
