"""The settings of a consumer for the streams that it opens afterwards.

CONTROL carries a name and a text. Names are those that shipped in DCP where there is one. A name that is not
in the table, or a text that cannot be read, is refused with a sentence, and nothing changes. Texts are short,
which bounds what the node compiles, stores and shows for a consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from upper.errors import InvalidArguments
from upper.model.messages import StreamRequest
from upper.model.values import Epoch, NodeId
from upper.server.filters import EVERYTHING, Filter

MAX_WINDOW = 1 << 31
MAX_NAME = 200
MAX_TEXT = 4096  # bytes


class Controls:
    """The settings of one connection."""

    opened = ""  # DCP: the name that OPEN gave this connection
    stops_by_partition = False  # a request to stop names the partition, and is answered
    flushes = True  # the consumer takes FLUSH
    form = 0  # of changes, where the dialect has several
    ends_on_stop = True  # STREAM_END follows a request to stop

    def __init__(self, *, noop_interval: float) -> None:
        self.window = 0  # bytes; 0 = none
        self.noop = False
        self.noop_interval = noop_interval  # seconds
        self.name = ""
        self.filter: Filter = EVERYTHING
        self.replica = NodeId("")  # the node that replicates over this connection
        self.epochs: dict[int, Epoch] = {}  # under which it replicates, by partition
        self._accepted: list[range] | None = None  # partitions; None = all

    def set(self, name: bytes, text: bytes) -> None:
        setter = self.settings.get(name.decode(errors="replace"))
        if setter is None:
            known = ", ".join(self.settings)
            unknown = name[:80].decode(errors="replace")
            raise InvalidArguments(f"there is no setting {unknown!r}; there are {known}")
        if len(text) > MAX_TEXT:
            raise InvalidArguments(f"a setting has at most {MAX_TEXT} bytes, not {len(text)}")
        try:
            setter(self, text)
        except UnicodeDecodeError:
            raise InvalidArguments("this setting is a text; send it as UTF-8") from None

    @property
    def settings(self) -> Mapping[str, Callable[..., None]]:
        """The setter of each setting."""
        return SETTINGS

    def request(self, asked: StreamRequest) -> StreamRequest:
        """A stream request with the flags of the model."""
        return asked

    def accepts(self, partition: int) -> bool:
        return self._accepted is None or any(partition in some for some in self._accepted)

    @property
    def accepted(self) -> str:
        """The partitions that streams may be opened for, as `accept.vbuckets` has them; empty for all."""
        ranges = self._accepted or []
        return ",".join(f"{some[0]}-{some[-1]}" if len(some) > 1 else f"{some[0]}" for some in ranges)

    # One method for each row of the table below.

    def _window(self, text: bytes) -> None:
        self.window = _number(text.decode(), "connection_buffer_size", 0, MAX_WINDOW)

    def _noop(self, text: bytes) -> None:
        if text not in (b"true", b"false"):
            raise InvalidArguments(f"enable_noop is true or false, not {text.decode()!r}")
        self.noop = text == b"true"

    def _interval(self, text: bytes) -> None:
        try:
            interval = float(text.decode())
        except ValueError:
            interval = 0.0
        if not 0.1 <= interval <= 86400:
            raise InvalidArguments("set_noop_interval is a number of seconds from 0.1 to 86400")
        self.noop_interval = interval

    def _name(self, text: bytes) -> None:
        name = text.decode()
        if len(name) > MAX_NAME or not name.isprintable():
            raise InvalidArguments(f"a name has at most {MAX_NAME} printable characters")
        self.name = name

    def _replica(self, text: bytes) -> None:
        node = text.decode()
        if not 0 < len(node) <= MAX_NAME or not node.isprintable():
            raise InvalidArguments(f"a node id has 1 to {MAX_NAME} printable characters")
        self.replica = NodeId(node)

    def _epochs(self, text: bytes) -> None:
        epochs: dict[int, Epoch] = {}
        for pair in text.decode().split(","):
            partition, _, epoch = pair.partition("=")
            epochs[_number(partition, "a partition", 0, 65535)] = Epoch(_number(epoch, "an epoch", 1, 2**63))
        self.epochs.update(epochs)

    def _prefix(self, text: bytes) -> None:
        self.filter = self.filter.with_prefix(text)  # keys are bytes, and need not be UTF-8

    def _pattern(self, text: bytes) -> None:
        self.filter = self.filter.with_pattern(text.decode())

    def _value(self, text: bytes) -> None:
        self.filter = self.filter.with_value(text.decode())

    def _mode(self, text: bytes) -> None:
        self.filter = self.filter.with_mode(text.decode())

    def _operations(self, text: bytes) -> None:
        self.filter = self.filter.with_operations(text.decode())

    def _accept(self, text: bytes) -> None:
        self._accepted = parse_partitions(text.decode()) if text.strip() else None


_TABLE: Mapping[str, tuple[Callable[[Controls, bytes], None], str]] = {
    "connection_buffer_size": (Controls._window, "bytes that may be unacknowledged; 0 = any number"),
    "enable_noop": (Controls._noop, "true: the node sends NOOP to a silent consumer"),
    "set_noop_interval": (
        Controls._interval,
        "seconds of silence before a NOOP; after two it closes",
    ),
    "name": (Controls._name, "the name of the consumer in statistics"),
    "filter.key.prefix": (Controls._prefix, "only keys that begin with this"),
    "filter.key.pattern": (Controls._pattern, "only keys in which this RE2 pattern is found"),
    "filter.value": (Controls._value, 'only values for which this holds, such as `$.type == "order"`'),
    "filter.mode": (
        Controls._mode,
        "`view`: a key whose value no longer matches is deleted; `events`: it is left out",
    ),
    "filter.operations": (Controls._operations, "any of mutation, deletion, expiration, with commas"),
    "replica.node": (Controls._replica, "the id of the node that replicates over this connection"),
    "replica.epochs": (
        Controls._epochs,
        "epochs under which it replicates, such as `0=3,17=1`; those of other partitions stay",
    ),
    "accept.vbuckets": (Controls._accept, "refuse streams of other partitions, such as `0-15,99`"),
}
SETTINGS = {name: setter for name, (setter, _) in _TABLE.items()}
ABOUT = {name: about for name, (_, about) in _TABLE.items()}


def parse_partitions(text: str) -> list[range]:
    """`0-15,99` as ranges."""
    found: list[range] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _number(first, "a partition", 0, 65535)
        high = _number(last, "a partition", 0, 65535) if dash else low
        if high < low:
            raise InvalidArguments(f"{part.strip()!r} runs backwards; write {high}-{low}")
        found.append(range(low, high + 1))
    return found


def _number(text: str, what: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise InvalidArguments(f"{what} is a number from {least} to {most}, not {text[:80]!r}")
    return number
