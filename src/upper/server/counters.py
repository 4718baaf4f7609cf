"""What a node counts and times while it runs: plain numbers, incremented where something happens.

`stats.py` has the rows that show them.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from upper import kernel


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


class Timings:
    """The time of each command of the table, and of `run`: a stretch of plain requests answered in one go."""

    def __init__(self) -> None:
        self.commands: dict[str, kernel.Timing] = defaultdict(kernel.Timing)
        self.run = self.commands["run"]
        self.disk = kernel.Timing()  # of batches: writing one and syncing it

    def command(self, name: str, seconds: float) -> None:
        self.commands[name].add(seconds)
