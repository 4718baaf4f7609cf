"""What a consumer may set for the streams that it opens from then on.

CONTROL carries a name and a text. Names are those that shipped in DCP where there is one. A name that is
not in the table, or a text that cannot be read, is refused with a sentence, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from upper.errors import InvalidArguments
from upper.server.filters import EVERYTHING, Filter

MAX_WINDOW = 1 << 31
MAX_NAME = 200


class Controls:
    """The settings of one connection."""

    def __init__(self) -> None:
        self.window = 0  # bytes; 0 = none
        self.noop = False
        self.noop_interval = 20.0  # seconds
        self.name = ""
        self.filter: Filter = EVERYTHING
        self._accepted: frozenset[int] | None = None  # partitions; None = all

    def set(self, name: str, text: str) -> None:
        try:
            setter = SETTINGS[name]
        except KeyError:
            known = ", ".join(SETTINGS)
            raise InvalidArguments(f"there is no setting {name!r}; there are {known}") from None
        setter(self, text)

    def accepts(self, partition: int) -> bool:
        return self._accepted is None or partition in self._accepted

    # One method for each row of the table below.

    def _window(self, text: str) -> None:
        self.window = _number(text, "connection_buffer_size", 0, MAX_WINDOW)

    def _noop(self, text: str) -> None:
        if text not in ("true", "false"):
            raise InvalidArguments(f"enable_noop is true or false, not {text!r}")
        self.noop = text == "true"

    def _interval(self, text: str) -> None:
        try:
            interval = float(text)
        except ValueError:
            interval = 0.0
        if not 0.1 <= interval <= 86400:
            raise InvalidArguments(f"set_noop_interval is a number of seconds, not {text!r}")
        self.noop_interval = interval

    def _name(self, text: str) -> None:
        if len(text) > MAX_NAME or not text.isprintable():
            raise InvalidArguments(f"a name has at most {MAX_NAME} printable characters")
        self.name = text

    def _prefix(self, text: str) -> None:
        self.filter = self.filter.with_prefix(text.encode(errors="surrogateescape"))

    def _pattern(self, text: str) -> None:
        self.filter = self.filter.with_pattern(text)

    def _value(self, text: str) -> None:
        self.filter = self.filter.with_value(text)

    def _operations(self, text: str) -> None:
        self.filter = self.filter.with_operations(text)

    def _accept(self, text: str) -> None:
        self._accepted = frozenset(parse_partitions(text)) if text.strip() else None


_TABLE: Mapping[str, tuple[Callable[[Controls, str], None], str]] = {
    "connection_buffer_size": (Controls._window, "bytes that may be unacknowledged; 0 = any number"),
    "enable_noop": (Controls._noop, "true: the node asks a silent consumer whether it is there"),
    "set_noop_interval": (Controls._interval, "seconds of silence before it asks; after two it closes"),
    "name": (Controls._name, "what the consumer is called in statistics"),
    "filter.key.prefix": (Controls._prefix, "only keys that begin with this"),
    "filter.key.pattern": (Controls._pattern, "only keys in which this RE2 pattern is found"),
    "filter.value": (Controls._value, 'only values for which this holds, such as `$.type == "order"`'),
    "filter.operations": (Controls._operations, "any of mutation, deletion, expiration, with commas"),
    "accept.vbuckets": (Controls._accept, "refuse streams of other partitions, such as `0-15,99`"),
}
SETTINGS = {name: setter for name, (setter, _) in _TABLE.items()}
ABOUT = {name: about for name, (_, about) in _TABLE.items()}


def parse_partitions(text: str) -> set[int]:
    """`0-15,99` as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _number(first, "a partition", 0, 65535)
        high = _number(last, "a partition", 0, 65535) if dash else low
        found.update(range(low, high + 1))
    return found


def _number(text: str, what: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise InvalidArguments(f"{what} is a number from {least} to {most}, not {text!r}")
    return number
