"""Ctrl-C ends a verb without a traceback, at every moment of its run.

Python raises KeyboardInterrupt in whatever code the main thread runs. Until a verb has begun there is nothing
to undo, so the process ends at once (`main`). From then on the exception unwinds the verb. It is raised again
while it has no effect: a finalizer, a callback of a weak reference (every import has one) or a library in C
that clears errors may have swallowed it. When the verb is unwound the process ends without Python's
finalization, which would wait for threads that are still at work.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

REPEAT = 0.5  # seconds between two attempts


def unwind() -> None:
    """Ctrl-C raises KeyboardInterrupt from now on, again and again until it takes effect."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGALRM, _again)
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _swallowed


def handled() -> None:
    """A verb has handled the interrupt, and goes on to report what it has done."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def leave(code: int) -> NoReturn:
    """End this process now, after a verb that was interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends anyway
    handled()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader has ended, or it is closed
            pass
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, REPEAT, REPEAT)
    raise KeyboardInterrupt


def _again(number: int, frame: FrameType | None) -> None:
    if not _unwinding():
        raise KeyboardInterrupt


def _swallowed(error: UnraisableHookArgs) -> None:
    """An error where Python cannot raise one. An interrupt is raised again, so it is not printed."""
    if not issubclass(error.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(error)


def _unwinding() -> bool:
    """Whether this signal arrived in a `finally`, an `except` or an `__exit__` because of the first one."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
