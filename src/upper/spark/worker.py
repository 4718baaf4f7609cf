"""Setup of a Python worker of Spark before its first task."""

from __future__ import annotations

import atexit
import gc

_settled = False


def settle() -> None:
    """Exclude imported modules from garbage collection, once in each worker.

    Spark collects garbage after every task. With everything that PySpark and pyarrow import that takes tens
    of milliseconds, which is most of a small batch; without it, three.
    """
    global _settled
    if not _settled:  # gc.get_freeze_count() takes as long as a small collection
        gc.freeze()
        # Some libraries warn at exit about objects that are still frozen.
        atexit.register(gc.unfreeze)
        _settled = True
