"""Chooses the kernel that runs: the compiled one, if it was built from the sources that are beside it.

A compiled kernel of other sources is not used, because its functions may not fit the modules that call
them. The plain one then runs, and a warning names the remedy. `setup.py` loads this file alone, so it imports
nothing of upper.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
REMEDY = "build it again with `make kernel`, or install upper-kv again"


def choose(wanted: str) -> ModuleType:
    """The module with the functions of the kernel. `wanted` is the value of UPPER_KERNEL."""
    if wanted != "plain":
        try:
            module = import_module("upper.kernel._compiled")
            _require_current(module)
            return module
        except ImportError as error:
            if wanted == "required":
                raise
            if any(HERE.glob("_compiled*.so")):
                import logging

                logging.getLogger(__name__).warning(
                    "the plain kernel runs, which is slower: the compiled one cannot be used (%s); %s",
                    error,
                    REMEDY,
                )
    return import_module("upper.kernel.plain")


def digest(directory: Path) -> str:
    """A checksum of the sources of the compiled kernel."""
    import hashlib

    found = hashlib.sha256()
    for path in sorted(_sources(directory)):
        found.update(f"{path.name}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _sources(directory: Path) -> list[Path]:
    return [path for path in directory.glob("_*") if path.suffix in (".pyx", ".pxi", ".h")]


def _require_current(module: ModuleType) -> None:
    """Raise ImportError if the module was built from other sources. They are read only if one is newer."""
    built = os.stat(str(module.__file__)).st_mtime
    newer = any(path.stat().st_mtime > built for path in _sources(HERE))
    if newer and digest(HERE) != getattr(module, "SOURCES", ""):
        raise ImportError("its sources have changed since it was built")
