"""What a node counts and times while it runs: plain numbers, incremented where something happens.

`stats.py` has the rows that show them.
"""

from __future__ import annotations

from collections import Counter, defaultdict


class Counters:
    """The counters of a node, incremented where something happens."""

    def __init__(self) -> None:
        self.connections = self.refused_connections = self.requests = self.bytes_in = self.bytes_out = 0
        self.protocol_errors = self.failed_logins = self.not_my_partition = self.failed_commits = 0
        self.misses: Counter[str] = Counter()  # keys that were not there, by command of the table
        self.streams_opened = self.rollbacks = self.fell_behind = self.dead_peers = 0
        self.stream_items = self.stream_bytes = 0  # of streams that have ended
        # Of copies here that are replicated from other nodes.
        self.replica_bytes = self.replica_connections = self.replica_rollbacks = 0
        self.replica_acknowledgements = 0


class Timing:
    """How often something was done and how long it took: in all, and in powers of two of a microsecond."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * 64  # enough for any duration, so `add` needs no check
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[int(seconds * 1e6).bit_length()] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


class Timings:
    """The time of each command of the table, and of `run`: a stretch of plain requests answered in one go."""

    def __init__(self) -> None:
        self.commands: dict[str, Timing] = defaultdict(Timing)
        self.run = self.commands["run"]
        self.disk = Timing()  # of batches: writing one and syncing it

    def command(self, name: str, seconds: float) -> None:
        self.commands[name].add(seconds)
