"""The loops that run once per change, compiled where that was possible at installation.

Two modules hold the same functions: `_compiled` (Cython) and `plain` (Python, and the text to read).
This file chooses, once, at import; `NAME` says which one runs. The environment variable UPPER_KERNEL
overrules: `plain` takes the twin, `required` refuses to start without the compiled one.

What both promise: no byte of the input is trusted, no length field leads to an allocation, and every
result of one is the result of the other, byte for byte (tests/kernel holds them to it). Bytes that come
in (`data`) may be bytes, a bytearray or a contiguous memoryview; anything else is a TypeError. The plain
`run` and `replay` copy what is not bytes, so whoever calls them in a loop passes bytes.

All loops but `gather` hold the interpreter's lock, and none allocates anything that the cycle collector
tracks: a record is bytes, and a dict of bytes is not visited by it either (up to Python 3.13). A process
that keeps millions of records should still call `gc.freeze()` after loading and raise the thresholds, as
the node does, because lists of records (`pending`, chunks of a backfill) *are* visited.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from upper.kernel.packets import Columns, Entry, Items
from upper.kernel.plain_run import Clock
from upper.kernel.writing import Writer

_WANTED = os.environ.get("UPPER_KERNEL", "")

if TYPE_CHECKING or _WANTED == "plain":
    from upper.kernel.plain import (
        NAME,
        Counts,
        Table,
        after,
        columns,
        gather,
        group,
        join,
        latest,
        measure,
        reach,
        records,
        replay,
        retarget,
        run,
        scan,
        take,
        to_arrow,
        touched,
        writer,
    )
else:
    try:
        from upper.kernel._compiled import (
            NAME,
            Counts,
            Table,
            after,
            columns,
            gather,
            group,
            join,
            latest,
            measure,
            reach,
            records,
            replay,
            retarget,
            run,
            scan,
            take,
            to_arrow,
            touched,
            writer,
        )
    except ImportError:
        if _WANTED == "required":
            raise
        from upper.kernel.plain import (
            NAME,
            Counts,
            Table,
            after,
            columns,
            gather,
            group,
            join,
            latest,
            measure,
            reach,
            records,
            replay,
            retarget,
            run,
            scan,
            take,
            to_arrow,
            touched,
            writer,
        )

__all__ = [
    "NAME",
    # what comes from a socket
    "scan",
    "records",
    "run",
    # what goes to a socket
    "join",
    "retarget",
    # what goes to a file, and what comes from one
    "touched",
    "reach",
    "gather",
    "replay",
    "writer",
    # maps and lists of records
    "after",
    "group",
    "latest",
    "measure",
    "take",
    # columns
    "columns",
    "to_arrow",
    # types
    "Clock",
    "Columns",
    "Counts",
    "Entry",
    "Items",
    "Table",
    "Writer",
]
