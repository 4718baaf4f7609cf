"""The loops that run once per change, compiled where that was possible at installation.

Two modules hold the same functions: `_compiled` (Cython) and `plain` (Python, and the text to read).
`choice` chooses one of them, once, at import; `NAME` is the one that runs. The environment variable
UPPER_KERNEL overrides it: `plain` selects the Python one, `required` fails without the compiled one.

Both guarantee: no byte of the input is trusted, no length field leads to an allocation, and every
result of one is the result of the other, byte for byte (tests/kernel holds them to it). Bytes that come
in (`data`) may be bytes, a bytearray or a contiguous memoryview; anything else is a TypeError. The plain
`run` and `replay` copy what is not bytes, so callers in a loop pass bytes.

All loops hold the interpreter's lock; `receive` releases it for a system call. The records of partitions are
in memory that the cycle collector does not see (`RecordMap`), but a process that writes much should still
raise its thresholds, as the node does, because lists of records (chunks of a backfill) *are* visited.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from upper.kernel.choice import choose
from upper.kernel.packets import BETWEEN, INSIDE, Columns, Entry
from upper.kernel.plain_run import Clock
from upper.kernel.writing import Writer

if TYPE_CHECKING:
    from upper.kernel.plain import (
        NAME,
        Caller,
        CommitGroups,
        CopyProgress,
        Counts,
        Log,
        RecordMap,
        RecordView,
        RunOptions,
        Scanned,
        StreamForm,
        Table,
        TailProgress,
        Timing,
        acknowledge,
        answers,
        apply,
        attributed,
        columns,
        covered,
        crc32,
        events,
        join,
        latest,
        place,
        reach,
        receive,
        records,
        replay,
        requests,
        retarget,
        run,
        scan,
        stores,
        to_arrow,
        touched,
        weigh,
        writer,
        written,
        wrote,
    )

__all__ = [
    "NAME",
    # what comes from a socket
    "receive",
    "scan",
    "records",
    "events",
    "run",
    "apply",
    "answers",
    "place",
    "written",
    # what goes to a socket
    "requests",
    "stores",
    "join",
    "retarget",
    # what goes to a file, and what comes from one
    "touched",
    "weigh",
    "reach",
    "replay",
    "crc32",
    "writer",
    # how far replicas are
    "wrote",
    "acknowledge",
    "covered",
    # lists of records
    "latest",
    # columns
    "columns",
    "to_arrow",
    "attributed",
    # of streams in `apply`
    "BETWEEN",
    "INSIDE",
    # types
    "Caller",
    "Clock",
    "Columns",
    "CommitGroups",
    "CopyProgress",
    "Counts",
    "Entry",
    "Log",
    "RecordMap",
    "RecordView",
    "RunOptions",
    "Scanned",
    "StreamForm",
    "Table",
    "TailProgress",
    "Timing",
    "Writer",
]

if not TYPE_CHECKING:
    _chosen = choose(os.environ.get("UPPER_KERNEL", ""))
    globals().update({name: getattr(_chosen, name) for name in __all__ if name not in globals()})
