"""Setup of a Python worker of Spark before its first task."""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from contextlib import suppress

_prepared = False
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers, of malloc.h
KEPT = 64 * 1024 * 1024  # bytes of free memory that a worker keeps
BLOCK = 8 * 1024 * 1024  # bytes: larger blocks are given back at once


def prepare_process() -> None:
    """Prepare a process for tasks, once: what is collected as garbage, and what malloc keeps.

    Spark collects garbage after every task. With everything that PySpark and pyarrow import that takes tens
    of milliseconds, which is most of a small batch; without imported modules, three.
    """
    global _prepared
    if not _prepared:  # gc.get_freeze_count() takes as long as a small collection
        gc.freeze()
        # Some libraries warn at exit about objects that are still frozen.
        atexit.register(gc.unfreeze)
        _keep_free_memory()
        _prepared = True


def _keep_free_memory() -> None:
    """Let malloc use the memory of one batch for the next.

    By default it returns blocks of the size of a batch to the system and gets them again, page by page,
    which takes as long as receiving and decoding the rows in them.
    """
    with suppress(AttributeError, OSError):  # a system whose C library has no such setting
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, BLOCK)
        mallopt(TRIM_THRESHOLD, KEPT)


class _NoPandas:
    """Finds modules before Python's own finders, and no pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)


def hide_pandas() -> None:
    """Let no module of this process import pandas: for a program of our own, which uses none.

    Arrow imports pandas, where it is installed, when it first converts a value of Python. That takes a
    second, which is longer than most commits.
    """
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas())


def leave_pandas_out() -> None:
    """Let Arrow do without pandas, in a worker that runs only our tasks. Arrow looks for it once."""
    import pyarrow as pa

    hidden = list(sys.meta_path)
    hide_pandas()
    try:
        pa.scalar(0)
    finally:
        sys.meta_path[:] = hidden
