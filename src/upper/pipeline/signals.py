"""SIGTERM and SIGINT as an event that work looks at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue


def stop_signals(announce: Callable[[], None] = lambda: None, *, twice: bool = True) -> threading.Event:
    """Set by SIGTERM and SIGINT, whose handler calls `announce`: work under way ends, or is abandoned.

    `twice`: a second Ctrl-C does not wait, and has the effect that it had before.
    """
    stopping = threading.Event()
    # A handler runs between any two instructions of the main thread, also while that holds the lock of the
    # event, where `set` would wait for ever. So another thread sets it; `put` is safe in a handler.
    requests: SimpleQueue[int] = SimpleQueue()

    def relay() -> None:
        requests.get()
        stopping.set()

    def stop_now(number: int, _: object) -> None:
        requests.put(number)
        announce()
        if twice and number == signal.SIGINT:
            signal.signal(signal.SIGINT, interrupt)

    if threading.current_thread() is threading.main_thread():
        threading.Thread(target=relay, name="stop-signals", daemon=True).start()
        before = signal.getsignal(signal.SIGINT)
        interrupt = before if callable(before) else signal.default_int_handler
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop_now)
    return stopping
