"""The two buckets of `upper replicate`, one direction or both, paused by a document of the target."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass

from upper.apps.push.rounds import Push
from upper.apps.push.state import lag
from upper.apps.replicate.documents import control_key
from upper.apps.replicate.target import Conflicts, ReplicaOptions, ReplicaTarget, same_partitions
from upper.client.bucket import Bucket
from upper.errors import InvalidArguments, KeyNotFound
from upper.pipeline.source import BucketSource, Filters
from upper.pipeline.target import Runner


@dataclass(frozen=True, kw_only=True)
class ReplicationSettings:
    name: str = ""  # of the documents in the target; by default the name of the source's bucket
    prefix: bytes = b""
    conflicts: Conflicts = "revision"
    both_ways: bool = False
    new_history: bool = False
    patience: float = 30.0  # seconds


@dataclass(frozen=True)
class ReplicationStatus:
    """The state of a replication, read from the target and compared with the source."""

    name: str
    target: str  # its URL
    paused: bool
    partitions: int  # partitions that have a position in the target
    behind: int  # changes that the target lacks, at most
    repairing: int  # partitions in which a repair is under way
    repairs: int  # partitions repaired so far, since the target began


class BucketPair:
    """Two buckets and the directions between them. Use it as a context manager."""

    def __init__(self, source: str, target: str, settings: ReplicationSettings) -> None:
        self._settings, self._stack = settings, ExitStack()
        self.there = self._direction(source, target)
        self.back = self._direction(target, source) if settings.both_ways else None
        ours, theirs = self.there[0].bucket, self.there[1].bucket
        same_partitions(ours.partitions, theirs.partitions)
        if ours.failover_logs() == theirs.failover_logs():
            raise InvalidArguments(f"SOURCE and TARGET are the same bucket, {theirs.address}; name two")

    def _direction(self, source_url: str, target_url: str) -> tuple[BucketSource, ReplicaTarget]:
        settings = self._settings
        filters = Filters(key_prefix=settings.prefix or None)
        source = BucketSource(source_url, filters=filters, patience=settings.patience, name="replicate")
        self._stack.callback(source.close)
        name = settings.name or source.bucket.address.bucket
        if settings.prefix:
            name += f":{settings.prefix.decode(errors='backslashreplace')}"
        options = ReplicaOptions(name, settings.prefix, settings.conflicts, settings.both_ways)
        target = ReplicaTarget(target_url, options, source_url=source_url, patience=settings.patience)
        self._stack.callback(target.close)
        return source, target

    def __enter__(self) -> BucketPair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pushes(self, runner: Runner) -> dict[str, Push]:
        """By the label of their direction."""
        new_history = self._settings.new_history
        found = {"there": Push(*self.there, runner, new_history=new_history)}
        if self.back is not None:
            found["back"] = Push(*self.back, runner, new_history=new_history)
        return found

    @property
    def _control(self) -> tuple[Bucket, bytes]:
        target = self.there[1]
        return target.bucket, control_key(target.name)

    def paused(self) -> bool:
        bucket, key = self._control
        try:
            return bool(json.loads(bucket.get(key).value)["paused"])
        except (KeyNotFound, ValueError, KeyError, TypeError):
            return False

    def pause(self, paused: bool) -> None:
        bucket, key = self._control
        bucket.set(key, json.dumps({"paused": paused}))

    def status(self) -> list[ReplicationStatus]:
        found = []
        for source, target in filter(None, (self.there, self.back)):
            states = {p: held.state for p, held in target.load().items()}
            found.append(
                ReplicationStatus(
                    name=target.name,
                    target=str(target.bucket.address),
                    paused=self.paused(),
                    partitions=len(states),
                    behind=lag(states, source.seqnos()),
                    repairing=sum(state.repair is not None for state in states.values()),
                    repairs=sum(state.epoch for state in states.values()),
                )
            )
        return found
