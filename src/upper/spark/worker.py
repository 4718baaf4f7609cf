"""What every Python worker of Spark does before its first task."""

from __future__ import annotations

import gc


def settle() -> None:
    """Once in each worker: what was imported stays, so a collection need not look at it again.

    Spark collects garbage after every task. Over all that PySpark and pyarrow import that takes tens of
    milliseconds, which is most of a small batch; over what a task really made it takes three.
    """
    if not gc.get_freeze_count():
        gc.freeze()
