"""Clusters of real processes under random faults, with clients of every kind, and what must hold at the end.

A seed decides which faults happen and when. What they meet depends on the machine, so that a seed repeats
the schedule, and not every detail. Faults come in episodes. After each of them everything is healed, every
copy has to become in sync, and every key has to be written again. At the end:

- every acknowledged write is there, and every read was linearizable (`History`);
- every counter is the number of increments that were acknowledged, or more by those of unknown outcome, and
  no two of them returned the same value;
- every consumer, which began again from its checkpoint now and then, holds what the bucket holds, received
  no change twice and was never rolled back;
- the copies of each partition are the same on disk.

With `acknowledge=local` a failover may lose changes. There the first two are not required, and consumers may
be rolled back; they hold what the bucket holds all the same.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import upper
from tests.cluster.etcd import Etcd
from tests.cluster.links import OTHERS, Links
from tests.cluster.replicas import difference
from tests.cluster.running import PATIENCE, History, RunningCluster, store_of
from upper.client.checkpoint import Checkpoint
from upper.cluster import administration
from upper.cluster.members import ClusterState
from upper.errors import ClusterError, Unreachable
from upper.model.values import Partition
from upper.storage import BucketStore

LEASE = 2.0  # seconds


class Worker(threading.Thread):
    """A client in a thread; `failure` is what ended it."""

    def __init__(self, cluster: RunningCluster) -> None:
        super().__init__(daemon=True)
        self.cluster, self.ending, self.failure = cluster, threading.Event(), ""

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                with closing(self.cluster.connect()) as bucket:
                    self.work(bucket)
        except Exception as error:  # noqa: BLE001  # reported by the test
            self.failure = f"{type(self).__name__}: {error!r}"

    def work(self, bucket: upper.Bucket) -> None:
        raise NotImplementedError


class CounterClient(Worker):
    """Increments counters that it shares with others."""

    def __init__(self, cluster: RunningCluster, keys: list[str]) -> None:
        super().__init__(cluster)
        self.keys = keys
        self.returned: dict[str, list[int]] = {key: [] for key in keys}
        self.unknown: Counter[str] = Counter()

    def work(self, bucket: upper.Bucket) -> None:
        while not self.ending.is_set():
            for key in self.keys:
                try:
                    self.returned[key].append(bucket.incr(key, initial=1))
                except Unreachable as error:
                    if not error.sent:
                        raise
                    self.unknown[key] += 1


class ConsumerClient(Worker):
    """Keeps what it received, and goes back to its checkpoint now and then, as after a crash."""

    def __init__(self, cluster: RunningCluster, path: Path, seed: int, *, losses: bool) -> None:
        super().__init__(cluster)
        self._checkpoint, self._random, self._losses = Checkpoint(path), random.Random(seed), losses
        self.received: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
        self.reached: dict[int, int] = {}
        self.begun = self.rollbacks = 0

    def work(self, bucket: upper.Bucket) -> None:
        self._forget()
        self.begun += 1
        ends = time.monotonic() + self._random.uniform(0.3, 4.0)
        with bucket.changes(
            checkpoint=self._checkpoint, checkpoint_every=0.2, on_rollback=self._roll_back, patience=PATIENCE
        ) as feed:
            for event in feed:
                self._take(event)
                if self.ending.is_set() or time.monotonic() > ends:
                    return

    def _forget(self) -> None:
        """What was received after the checkpoint is gone."""
        saved = self._checkpoint.load()
        for partition, rows in self.received.items():
            known = saved.get(Partition(partition)) if saved is not None else None
            seqno = 0 if known is None else known.seqno
            self.received[partition] = [row for row in rows if row[0] <= seqno]
            self.reached[partition] = seqno

    def _roll_back(self, event: Any) -> None:
        self.rollbacks += 1
        rows = self.received.setdefault(event.partition, [])
        self.received[event.partition] = [row for row in rows if row[0] <= event.to]
        self.reached[event.partition] = event.to
        assert self._losses, f"partition {event.partition} was rolled back: {event}"

    def _take(self, event: Any) -> None:
        rows = self.received.setdefault(event.partition, [])
        if event.operation in ("mutation", "deletion", "expiration"):
            assert event.seqno > (rows[-1][0] if rows else 0), f"{event.seqno} follows {rows[-1][0]}"
            rows.append((event.seqno, event.key, getattr(event, "value", None)))
        elif event.operation == "rollback":
            return
        self.reached[event.partition] = max(self.reached.get(event.partition, 0), event.seqno)

    def content(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes | None] = {}
        for rows in self.received.values():
            found.update((key, value) for _, key, value in rows)
        return {key: value for key, value in found.items() if value is not None}


class Torture:
    """The clients and the faults of one run."""

    def __init__(
        self, cluster: RunningCluster, links: Links, seed: int, *, etcd: Etcd | None, losses: bool
    ) -> None:
        self.cluster, self.links, self.etcd, self.losses = cluster, links, etcd, losses
        self.random = random.Random(seed)
        self.history = History(cluster, keys=24, readers=1, writers=2)
        keys = [f"counter-{number}" for number in range(4)]
        self.counters = [CounterClient(cluster, keys) for _ in range(2)]
        self.consumers = [
            ConsumerClient(cluster, cluster.directory / f"checkpoint-{number}", seed + number, losses=losses)
            for number in range(2)
        ]
        self.nodes = set(cluster.nodes)
        self.done: Counter[str] = Counter()
        self.log: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Self]:
        workers: list[Worker] = [*self.counters, *self.consumers]
        for worker in workers:
            worker.start()
        try:
            with self.history.running():
                yield self
        finally:
            for worker in self.counters:
                worker.ending.set()
        for worker in self.counters:
            worker.join(PATIENCE)
        self._end_consumers()
        failures = [worker.failure for worker in workers if worker.failure]
        assert not failures, failures
        assert not any(worker.is_alive() for worker in workers), "a client hangs"

    # ── Faults ────────────────────────────────────────────────────────────────────────────────────

    def episode(self) -> None:
        """Some faults that overlap, then the end of all of them."""
        faults: list[tuple[int, Callable[[], None]]] = [
            (4, self.kill), (2, self.stop), (4, self.pause), (3, self.resume), (3, self.restart),
            (5, self.cut), (3, self.isolate), (1, self.power_loss), (3, self.rebalance), (1, self.cancel),
            (1, self.change_replicas), (1, self.fail_over),
        ]  # fmt: skip
        if self.etcd is not None:
            faults += [(4, self.cut_store), (1, self.restart_etcd)]
        weights, actions = zip(*faults, strict=True)
        for _ in range(self.random.randint(2, 6)):
            (action,) = self.random.choices(actions, weights)
            self.note(action.__name__)
            self.done[action.__name__] += 1
            with suppress(ClusterError):
                action()
            time.sleep(self.random.choice((0.0, 0.1, 0.5, 1.0, 2.5)) * self.random.random())
        self.heal()

    def note(self, what: str) -> None:
        self.log.append(f"{time.monotonic():.3f} {what}")

    def _some(self, *, running: bool = True) -> str | None:
        names = sorted(name for name in self.nodes if self.cluster.nodes[name].running is running)
        return self.random.choice(names) if names else None

    def kill(self) -> None:
        if (name := self._some()) is not None:
            self.note(f"  {name}")
            self.cluster.kill(name)

    def stop(self) -> None:
        if (name := self._some()) is not None:
            self.note(f"  {name}")
            self.cluster.nodes[name].resume()
            self.cluster.nodes[name].stop(within=60)

    def pause(self) -> None:
        if (name := self._some()) is not None:
            self.note(f"  {name}")
            self.cluster.nodes[name].pause()

    def resume(self) -> None:
        for name in self.nodes:
            if self.cluster.nodes[name].running:
                self.cluster.nodes[name].resume()

    def restart(self) -> None:
        if (name := self._some(running=False)) is not None:
            self.note(f"  {name}")
            self.links.heal()  # without its store it would not become ready
            self.cluster.start(name)

    def cut(self) -> None:
        source, to = self.random.choice([*sorted(self.nodes), OTHERS]), self.random.choice(sorted(self.nodes))
        if source != to:
            held = self.random.random() < 0.7
            self.note(f"  {source} to {to}, {'held' if held else 'reset'}")
            self.links.cut(source, to, held=held)

    def isolate(self) -> None:
        """No replica receives what a node writes, also not after the node was killed."""
        if (name := self._some()) is not None:
            self.note(f"  {name}")
            for other in sorted(self.nodes - {name}):
                self.links.cut(other, name, held=True)
            time.sleep(self.random.uniform(0.3, 1.5))
            self.cluster.kill(name)
            for other in sorted(self.nodes - {name}):
                self.links.cut(other, name, held=False)

    def cut_store(self) -> None:
        name = self.random.choice(sorted(self.nodes))
        held = self.random.random() < 0.7
        self.note(f"  {name}, {'held' if held else 'reset'}")
        self.links.cut(name, store_of(name), held=held)

    def restart_etcd(self) -> None:
        assert self.etcd is not None
        self.etcd.stop()
        time.sleep(self.random.choice((0.0, 1.0, 4.0)))
        self.etcd.start()

    def power_loss(self) -> None:
        """Every process ends at once."""
        nodes = [self.cluster.nodes[name] for name in sorted(self.nodes)]
        threads = [threading.Thread(target=node.kill) for node in nodes if node.running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def rebalance(self) -> None:
        state = self.cluster.state()
        members = {member.name for member in state.members.values()}
        remove: list[str] = []
        if len(members) < 4:
            name = next(name for name in ("n1", "n2", "n3", "n4") if name not in members)
            self.links.heal()
            self.nodes.add(name)
            if name not in self.cluster.nodes or not self.cluster.nodes[name].running:
                self.cluster.start(name)
        else:
            remove = [self.random.choice(sorted(members))]
        state = self.cluster.state()
        at_once = self.random.choice((1, 2, 128))
        plan = administration.planned(state, remove=remove, at_once=at_once)
        self.note(f"  {remove} {plan.total}")
        administration.start_rebalance(self.cluster.store, plan, state)
        self.done["rebalances begun"] += 1

    def cancel(self) -> None:
        administration.cancel_rebalance(self.cluster.store)

    def change_replicas(self) -> None:
        administration.change_settings(self.cluster.store, {"replicas": self.random.choice("12")})
        self.done["replicas changed"] += 1

    def fail_over(self) -> None:
        if (name := self._some(running=False)) is not None:
            administration.fail_over_by_hand(self.cluster.store, name, {}, force=False)
            self.done["failovers by hand"] += 1

    def heal(self) -> None:
        """End all faults, and wait until the cluster is whole and every client goes on."""
        self.note("heal")
        self.links.heal()
        self.resume()
        down = sorted(name for name in self.nodes if not self.cluster.nodes[name].running)
        if down:
            with ThreadPoolExecutor(len(down)) as threads:
                list(threads.map(self.cluster.start, down))
        self.until_whole()
        for name in sorted(self.nodes - {m.name for m in self.cluster.state().members.values()}):
            self.nodes.discard(name)
            self.cluster.nodes[name].stop(within=60)
        self.history.until_acknowledged(2 * len(self.history.keys))
        for worker in (*self.counters, *self.consumers):
            assert not worker.failure, worker.failure
        self.note("healed")

    def until_whole(self) -> ClusterState:
        def whole(state: ClusterState) -> bool:
            bucket_map = administration.bucket_of(state)
            return (
                state.rebalance is None
                and len(state.alive) == len(state.members)
                and all(
                    len(entry.in_sync) == len(entry.copies) == bucket_map.settings.replicas + 1
                    and entry.moving_to is None
                    for entry in bucket_map.entries
                )
            )

        return self.cluster.until(whole)

    # ── The end ───────────────────────────────────────────────────────────────────────────────────

    def _end_consumers(self) -> None:
        """Let consumers receive everything, and end. They look when they get something: `nudge` keys."""
        with closing(self.cluster.connect()) as bucket:
            highs, ends = bucket.seqnos(), time.monotonic() + PATIENCE

            def behind() -> list[Any]:
                return [
                    (partition, high, consumer.reached.get(partition, 0))
                    for consumer in self.consumers
                    for partition, high in highs.items()
                    if consumer.reached.get(partition, 0) < high and not consumer.failure
                ]

            while behind():
                assert time.monotonic() < ends, f"not received: {behind()}\n{self.cluster.logs()}"
                time.sleep(0.05)
            for consumer in self.consumers:
                consumer.ending.set()
            while any(consumer.is_alive() for consumer in self.consumers) and time.monotonic() < ends:
                bucket.set_many({f"nudge-{number}": str(time.monotonic()) for number in range(64)})
                time.sleep(0.05)

    def check(self) -> None:
        if not self.losses:
            self.history.check()
        with closing(self.cluster.connect()) as bucket:
            content = {key: item.value for key, item in bucket.scan() if not key.startswith(b"nudge")}
            if not self.losses:
                self._check_counters(content)
            for consumer in self.consumers:
                found = {k: v for k, v in consumer.content().items() if not k.startswith(b"nudge")}
                assert found == content, _differences(found, content)
        self._check_copies()

    def _check_counters(self, content: dict[bytes, bytes]) -> None:
        for key in self.counters[0].keys:
            returned = [value for client in self.counters for value in client.returned[key]]
            unknown = sum(client.unknown[key] for client in self.counters)
            assert len(set(returned)) == len(returned), f"{key}: two increments returned the same value"
            value = int(content[key.encode()])
            assert len(returned) <= value <= len(returned) + unknown, (key, value, len(returned), unknown)
            for client in self.counters:
                assert client.returned[key] == sorted(client.returned[key]), f"{key} went back"

    def _check_copies(self) -> None:
        """Every process ends at once; then the directories are compared."""
        state = self.until_whole()
        self.power_loss()
        opened = {
            node: BucketStore.open(self.cluster.directory / state.name_of(node)) for node in state.members
        }
        try:
            for number, entry in enumerate(administration.bucket_of(state).entries):
                active = opened[entry.active].partitions[number]
                for node in entry.replicas:
                    found = difference(active, opened[node].partitions[number])
                    assert not found, f"{state.name_of(entry.active)}, {state.name_of(node)}: {found}"
        finally:
            for bucket in opened.values():
                bucket.close()

    def summary(self) -> str:
        return (
            f"{self.history.acknowledged()} writes, "
            f"{sum(len(c.returned[k]) for c in self.counters for k in c.keys)} increments "
            f"({sum(c.unknown.total() for c in self.counters)} unknown), "
            f"{sum(c.begun for c in self.consumers)} feeds, "
            f"{sum(c.rollbacks for c in self.consumers)} rollbacks; {dict(self.done)}"
        )


def _differences(found: dict[bytes, bytes], content: dict[bytes, bytes]) -> str:
    keys = [key for key in found.keys() | content.keys() if found.get(key) != content.get(key)]
    return "; ".join(f"{k!r}: {found.get(k)!r}, not {content.get(k)!r}" for k in sorted(keys)[:10])


def torture(
    directory: Path,
    seed: int,
    *,
    episodes: int,
    etcd: Etcd | None = None,
    acknowledge: str = "in-sync",
) -> str:
    """One run; what it did."""
    store = None if etcd is None else f"etcd://127.0.0.1:{etcd.port}/{directory.name}"
    chance = random.Random(seed)
    with RunningCluster(directory, store, lease=LEASE) as cluster:
        links = cluster.use_links()
        cluster.create(3, replicas=chance.choice((1, 1, 2)), acknowledge=acknowledge)
        run = Torture(cluster, links, seed, etcd=etcd, losses=acknowledge == "local")
        try:
            with run.running():
                run.history.until_acknowledged(50)
                run.isolate()  # in every run, because it loses what was acknowledged too early
                run.heal()
                for _ in range(episodes):
                    run.episode()
            run.check()
        except BaseException as error:
            error.add_note("\n".join([f"seed {seed}", *run.log[-60:]]))
            raise
        return run.summary()
