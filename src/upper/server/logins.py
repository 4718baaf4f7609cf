"""How often a login may fail, and the order in which passwords are checked.

Failures are counted by address and user name, and by address alone for guesses over many names. A counter
that is full refuses the next attempt before it is evaluated, also with the right password: otherwise
guessing could go on. Other users of the same address are not affected, and a successful login clears the
counter of its user.

Checking a password is slow on purpose and runs in one thread. Addresses take turns, so that many attempts
from one of them delay another by no more than one check. Attempts that became refused while they waited are
never evaluated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from upper.errors import AuthenticationFailed, Busy
from upper.server.auth import User, Users

MINUTE = 60.0
REMEMBERED = 10_000  # counters; addresses and names are cheap to make up, so the oldest go first
NAMES = 5  # times the limit of one user is the limit of an address


class Throttle:
    """Failed logins of the last minute."""

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit, now
        self._failures: dict[tuple[str, str | None], deque[float]] = {}

    def check(self, host: str, name: str) -> None:
        """Refuse an attempt of this user from this address, if there were too many."""
        if self._count((host, name)) >= self._limit or self._count((host, None)) >= NAMES * self._limit:
            raise Busy("too many failed logins of this user or from this address; wait a minute")

    def failed(self, host: str, name: str) -> None:
        for counter in ((host, name), (host, None)):
            self._failures.setdefault(counter, deque(maxlen=NAMES * self._limit)).append(self._now())
        while len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def succeeded(self, host: str, name: str) -> None:
        self._failures.pop((host, name), None)

    def _count(self, counter: tuple[str, str | None]) -> int:
        failures = self._failures.get(counter)
        if failures is None:
            return 0
        while failures and failures[0] < self._now() - MINUTE:
            failures.popleft()
        if not failures:
            del self._failures[counter]
        return len(failures)


class _Attempt(NamedTuple):
    host: str
    name: str
    password: str
    users: Users
    outcome: asyncio.Future[User]


class PasswordChecks:
    """Checks passwords beside the loop, one at a time, for one address after the other."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upper-login")
        self._waiting: dict[str, deque[_Attempt]] = {}  # by address; the first has the next turn
        self._checking: _Attempt | None = None

    async def check(self, users: Users, host: str, name: str, password: str) -> User:
        """The user, or `AuthenticationFailed`, or `Busy`."""
        outcome: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(_Attempt(host, name, password, users, outcome))
        self._next()
        return await outcome

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._checking is None and self._waiting:
            host, attempts = next(iter(self._waiting.items()))
            attempt = attempts.popleft()
            del self._waiting[host]
            if attempts:
                self._waiting[host] = attempts  # behind the others
            if attempt.outcome.done():
                continue  # its connection is gone
            try:
                self._throttle.check(host, attempt.name)
            except Busy as refused:
                attempt.outcome.set_exception(refused)
                continue
            self._checking = attempt
            loop = attempt.outcome.get_loop()
            found = loop.run_in_executor(self._thread, attempt.users.check, attempt.name, attempt.password)
            found.add_done_callback(self._checked)

    def _checked(self, found: asyncio.Future[User]) -> None:
        attempt, self._checking = self._checking, None
        if attempt is None or found.cancelled():
            return
        error = found.exception()
        if isinstance(error, AuthenticationFailed):
            self._throttle.failed(attempt.host, attempt.name)
        elif error is None:
            self._throttle.succeeded(attempt.host, attempt.name)
        if not attempt.outcome.done():
            if error is None:
                attempt.outcome.set_result(found.result())
            else:
                attempt.outcome.set_exception(error)
        self._next()
