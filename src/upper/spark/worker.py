"""What every Python worker of Spark does before its first task."""

from __future__ import annotations

import atexit
import gc

_settled = False


def settle() -> None:
    """Once in each worker: what was imported stays, so a collection need not look at it again.

    Spark collects garbage after every task. Over all that PySpark and pyarrow import that takes tens of
    milliseconds, which is most of a small batch; over what a task really made it takes three.
    """
    global _settled
    if not _settled:  # asking `gc` would take it as long as a small collection
        gc.freeze()
        # A process that ends in order lets go of everything; some libraries complain about what is left.
        atexit.register(gc.unfreeze)
        _settled = True
