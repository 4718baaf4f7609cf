"""`make demo`: a shop writes to a cluster of three nodes, Spark keeps a lake, and nodes fail.

The steps: three nodes store a shop's data; Spark copies it to a lake; further changes follow; a node is
killed, replicas take over, and nothing is lost; then all copies but one stop, the last one is lost with the
newest changes, and an out-of-date copy is promoted by force. The lake rolls back, keeps the lost changes
in `lost`, and is compared with the bucket. Its typed tables answer what the owner of the shop would ask.

The seed determines what is written, rolled back and kept. Times depend on the machine, and so does the number
of intermediate versions of a key that the lake receives.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import upper
from demo.shop import Shop, Write
from demo.stage import Actor, Guard, Trouble, chart, may_be_swept, remember, run, running_in, until
from upper.apps.lake.lake import Lake
from upper.client.bucket import Bucket
from upper.errors import UpperError
from upper.history.resume import common_point
from upper.model.values import Partition, partition_of

PARTITIONS = 64
NODES = ("n1", "n2", "n3")
TYPES = """\
tables:
  users:
    key: "user:{id}"
    columns: {name: string, city: string, tier: string}
  orders:
    key: "order:{id}"
    columns:
      id: {part: id, type: string}
      customer: {path: user, type: string}
      total_cents: long
      status: string
"""
BEST_CITIES = (
    "select city, count(*) as orders, sum(total_cents) // 100 as revenue, "
    "100 * sum(total_cents) filter (tier = 'gold') // sum(total_cents) as gold_percent "
    "from orders join users on customer = text(users._key) group by city order by revenue desc limit 5"
)
QUERIES = (
    "select operation, count(*) as changes from changes group by 1",
    "select status, count(*) as orders, avg(total_cents) / 100 as average from orders group by status",
)


class Story:
    """One run of the demo; all its files are in `directory`."""

    def __init__(self, directory: Path, *, seed: int, keep: bool) -> None:
        self.directory, self.seed, self.keep = directory, seed, keep
        self.agreement, self.lake = directory / "agreement", directory / "lake"
        self.shop = Shop(seed)
        self.actors: list[Actor] = []
        self.guard = Guard()
        self.nodes: dict[str, Actor] = {}
        self.ports: dict[str, int] = {}
        self.changes = 0  # in the bucket, including expirations that are due
        self.began = time.monotonic()

    @property
    def url(self) -> str:
        return f"upr://{','.join(f'127.0.0.1:{port}' for port in self.ports.values())}/default"

    # ── The steps ─────────────────────────────────────────────────────────────────────────────────

    def tell(self) -> None:
        self.say(f"A tea shop keeps its users, carts and orders in a bucket of {PARTITIONS} partitions.")
        self.start_cluster()
        sync = self.start_sync()
        with upper.connect(self.url, timeout=60) as bucket:
            self.load(bucket)
            self.first_sync(bucket, sync)
            self.trade(bucket, sync, changes=3_000)
            self.kill_a_node(bucket, sync)
            calm = self.leave_one_copy(bucket, sync)
            self.last_orders(bucket, orders=600)
            before = self.settle(bucket, sync)
            expected = self.fail_over(bucket, calm, before)
            self.write_on(bucket, changes=300)
            self.settle(bucket, sync)
            self.rolled_back(sync, expected)
            self.return_of_the_lost_node()
            if self.keep:
                self.wait_for_latest(sync)
            else:
                sync.stop()  # refreshes `latest`
        self.prove()
        self.ask()
        self.bow(sync)

    def load(self, bucket: Bucket) -> None:
        began = time.monotonic()
        self.write(bucket, self.shop.opening(users=2_000, orders=8_000))
        count = self.changes
        self.say(f"Loaded {count:,} documents, each on disk before it was confirmed ({rate(count, began)}).")

    def first_sync(self, bucket: Bucket, sync: Actor) -> None:
        self.note("Spark is starting and reads the bucket ...")
        self.wait_for_lake(bucket, sync)
        rows = sum(file.rows for file in Lake(self.lake).changes.files())
        self.say(f"The lake has all {rows:,} changes: tables `changes`, `latest` and `lost`, in Delta.")

    def trade(self, bucket: Bucket, sync: Actor, *, changes: int) -> None:
        """Write in ten portions while the lake follows."""
        writes = list(self.shop.trading(changes))
        deletes, left = sum(each.value is None for each in writes), sum(each.expiry > 0 for each in writes)
        self.say(f"The shop trades: {changes:,} writes while the lake follows, a commit about every second.")
        self.note(f"{deletes} orders are deleted; {left} carts are left behind and expire")
        lags: list[int] = []
        spell = changes // 10
        for first in range(0, changes, spell):
            began = time.monotonic()
            self.write(bucket, writes[first : first + spell])
            lags.append(self.behind(bucket))
            time.sleep(max(0.0, began + 0.5 - time.monotonic()))
        while lags[-1] and sync.running() and len(lags) < 120:
            time.sleep(0.25)
            lags.append(self.behind(bucket))
        self.note(f"changes behind: {chart(lags)}  most {max(lags):,}, at the end {lags[-1]:,}")

    def last_orders(self, bucket: Bucket, *, orders: int) -> None:
        """Write the changes that the failover will lose; keep the state of the shop before them."""
        self.calm_shop = copy.deepcopy(self.shop)
        self.write(bucket, self.shop.rush(orders))
        self.say(f"{orders:,} more orders are written just before the failure. All reach the lake.")

    def kill_a_node(self, bucket: Bucket, sync: Actor) -> None:
        """SIGKILL: the replicas of its partitions take over, and every confirmed change is on them."""
        before = self.settle(bucket, sync)
        rollbacks = self.rollbacks()
        owners = [entry["active"] for entry in self.status()["partitions"]]
        self.nodes["n2"].kill()
        began = time.monotonic()
        self.say("Node n2 is killed with SIGKILL. Its replicas take over once its lease of 3 s is over.")
        keys = map("probe:{}".format, range(10_000))
        key = next(each for each in keys if owners[partition_of(each.encode(), PARTITIONS)] == "n2")
        bucket.set(key, b"{}")
        bucket.delete(key)
        self.changes += 2
        self.note(f"the first write to one of its partitions was confirmed after {passed(began)}")
        after = self.settle(bucket, sync)
        if missing := [number for number, seqno in before.items() if after[number] < seqno]:
            raise Trouble(f"partitions {missing} lack confirmed changes; this is a bug, please report it")
        if self.rollbacks() != rollbacks:
            raise Trouble("the lake was rolled back though nothing was lost; please report this bug")
        self.note(f"all {sum(before.values()):,} changes are still there, and the lake was not rolled back")
        self.start_node("n2")
        self.wait_for_cluster("n2 to be in sync again", lambda status: _all_in_sync(status))
        self.note("n2 is started again, has received what it missed, and is in sync")

    def leave_one_copy(self, bucket: Bucket, sync: Actor) -> dict[int, int]:
        """Stop two of three nodes. The third one takes over, and confirms what it alone has."""
        run("cluster", "set", str(self.agreement), "acknowledge=local")
        self.say("Now the bucket confirms a write once one node has it, and two of the three nodes stop.")
        self.note(f"upper cluster set {relative(self.agreement)} acknowledge=local")
        calm = self.settle(bucket, sync)
        for name in NODES[1:]:
            self.nodes[name].kill()  # one that is only stopped would find changes in its sockets later
        self.wait_for_cluster(
            "n1 to take over",
            lambda status: all(entry["in_sync"] == ["n1"] for entry in status["partitions"]),
        )
        return calm

    def fail_over(self, bucket: Bucket, calm: Mapping[int, int], before: Mapping[int, int]) -> int:
        """Lose the only node that has the newest changes, and promote the copies that lack them."""
        self.nodes["n1"].kill()
        for name in NODES[1:]:
            self.start_node(name)
        self.say("Node n1 is lost, the others return: no live copy has every change, so none takes over.")
        self.wait_for_cluster(
            "the cluster to notice",
            lambda status: [node["name"] for node in status["nodes"] if node["alive"]] == list(NODES[1:]),
        )
        command = ("cluster", "failover", str(self.agreement), "n1", "--force")
        self.note(f"upper cluster failover {relative(self.agreement)} n1 --force")
        for line in run(*command, "--yes").splitlines():
            self.note(line)
        after = bucket.seqnos()
        self.changes = sum(after.values())
        if self.changes != sum(calm.values()):
            raise Trouble(
                f"{self.changes} changes were promoted, not {sum(calm.values())}; please report this"
            )
        expected = sum(before.values()) - self.changes
        self.note(f"{expected:,} changes that the lake has already committed are not in the new history")
        return expected

    def return_of_the_lost_node(self) -> None:
        self.start_node("n1")
        self.wait_for_cluster("n1 to be in sync", lambda status: _all_in_sync(status))
        self.say("Node n1 returns: it discards what the others do not have, and is a replica.")

    def write_on(self, bucket: Bucket, *, changes: int) -> None:
        """Continue from the earlier state of the shop, with different changes."""
        self.shop = self.calm_shop
        self.shop.turn(self.seed + 1)
        self.write(bucket, self.shop.trading(changes))

    def rolled_back(self, sync: Actor, expected: int) -> None:
        # `lost` is committed right after the commit that brings the lake to the bucket's position.
        until(
            lambda: self.lost() >= expected, waiting_for="`lost` to be complete", actors=[sync], within=30.0
        )
        if (lost := self.lost()) != expected:
            raise Trouble(
                f"`lost` holds {lost} changes where {expected} were taken back; please report this bug"
            )
        self.say(f"The lake rolled back {self.rollbacks()} partitions and follows the new history.")
        self.note(f"removed from `changes` and `latest`, kept in `lost`: {lost:,} changes, as expected")

    def rollbacks(self) -> int:
        """The partitions of the lake that were rolled back."""
        return len(Lake(self.lake).changes.lake_position.rollbacks)

    def lost(self) -> int:
        return sum(file.rows for file in Lake(self.lake).lost.files())

    def prove(self) -> None:
        self.say("Some of the orders that the failover lost:")
        self.show_query(
            "select key, count(*) as changes from lost "
            "where text(key) like 'order:%' group by key order by key limit 4"
        )
        self.say("`upper verify` compares the lake with the bucket, partition by partition:")
        for line in run("verify", self.url, str(self.lake)).splitlines():
            self.note(line)
        self.note("(versions that were overwritten before the lake read them are not in `changes`)")

    def ask(self) -> None:
        self.say("A question: which cities buy the most, and how much of it do gold members buy?")
        self.note("(from `orders` and `users`, typed tables that the sync keeps as types.yml defines them)")
        self.show_query(BEST_CITIES)

    def bow(self, sync: Actor) -> None:
        minutes, seconds = divmod(round(time.monotonic() - self.began), 60)
        command, lake = relative(Path(sys.executable).parent / "upper"), relative(self.lake)
        self.say(f"Done in {minutes} min {seconds:02} s. The lake is kept; try:")
        self.note(f"{command} lake {lake}")
        self.note(f"{command} lake {lake} types")
        for query in QUERIES:
            self.note(f'{command} query {lake} "{query}"')
        if self.keep:
            self.say("Still running, because of --keep: three nodes and the sync.")
            self.note(f"{command} cluster status {relative(self.agreement)}")
            self.note(f"{command} tail {self.url}")
            self.say("To stop them:")
            pids = [actor.process.pid for actor in (sync, *self.nodes.values())]
            self.note(f"kill {' '.join(map(str, pids))}")

    # ── Parts of several steps ────────────────────────────────────────────────────────────────────

    def start_cluster(self) -> None:
        for name in NODES:
            self.start_node(name)
        self.wait_for_cluster("three nodes to join", lambda status: len(status["nodes"]) == len(NODES))
        size = ("--partitions", str(PARTITIONS), "--replicas", str(len(NODES) - 1))
        run("cluster", "create", str(self.agreement), *size)
        for name, node in self.nodes.items():
            until(lambda node=node: bool(node.lines()), waiting_for=f"{name} to be ready", actors=[node])  # type: ignore[misc]
            self.ports[name] = int(node.lines()[0]["port"])
        self.say("Three nodes form a cluster; each partition has an active copy and two replicas.")

    def start_node(self, name: str) -> None:
        place = ("--data", str(self.directory / name), "--join", str(self.agreement))
        port = ("--port", str(self.ports.get(name, 0)))
        self.nodes[name] = self.enter(name, ["serve", "--json", "--name", name, *place, *port])

    def status(self) -> dict[str, Any]:
        """The output of `upper cluster status`; without nodes before the first one has joined."""
        # It fails where partitions are unavailable, and before the first node has joined.
        printed = run("cluster", "status", str(self.agreement), "--json", check=False)
        status: dict[str, Any] = json.loads(printed) if printed else {"nodes": [], "partitions": []}
        return status

    def wait_for_cluster(self, waiting_for: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        running = [node for node in self.nodes.values() if node.running()]
        until(lambda: condition(self.status()), waiting_for=waiting_for, actors=running)

    def start_sync(self) -> Actor:
        types = self.directory / "types.yml"
        types.write_text(TYPES)
        often = ("--every", "1s", "--latest-every", "5s")
        return self.enter("sync", ["sync", self.url, str(self.lake), "--types", str(types), *often, "--json"])

    def enter(self, name: str, arguments: Sequence[str]) -> Actor:
        actor = Actor(name, arguments, directory=self.directory, guard=self.guard)
        self.actors.append(actor)
        remember(actor, self.directory)
        return actor

    def end(self, *, keep: bool) -> None:
        """End the demo, and its processes unless `keep` is set."""
        if keep:
            self.guard.tell("keep")
        else:
            for actor in reversed(self.actors):
                actor.stop(within=20.0)
        self.guard.leave()

    def write(self, bucket: Bucket, writes: Iterable[Write]) -> None:
        """Write in order; consecutive plain writes are sent together."""
        together: list[tuple[str, bytes]] = []

        def hand_in() -> None:
            if together:
                bucket.set_many(together)
                together.clear()

        for each in writes:
            self.changes += each.changes
            if each.value is not None and not each.expiry:
                together.append((each.key, each.value))
                continue
            hand_in()
            if each.value is None:
                bucket.delete(each.key)
            else:
                bucket.set(each.key, each.value, expiry=each.expiry)
        hand_in()

    def settle(self, bucket: Bucket, sync: Actor) -> dict[int, int]:
        """Wait until abandoned carts have expired and the lake is up to date; returns the bucket's seqnos."""
        until(
            lambda: sum(bucket.seqnos().values()) >= self.changes,
            waiting_for="abandoned carts to expire",
            actors=[node for node in self.nodes.values() if node.running()],
        )
        self.wait_for_lake(bucket, sync)
        return {int(partition): int(seqno) for partition, seqno in bucket.seqnos().items()}

    def wait_for_lake(self, bucket: Bucket, sync: Actor) -> None:
        until(
            lambda: self.behind(bucket) == 0, waiting_for="the lake to catch up", actors=[sync], within=300.0
        )

    def wait_for_latest(self, sync: Actor) -> None:
        """Wait until `latest` has all of `changes`: only the seed then decides how many keys it has."""
        partitions = frozenset(Partition(number) for number in range(PARTITIONS))

        def complete() -> bool:
            lake = Lake(self.lake)
            return not any(lake.latest.lake_position.lacking(lake.changes.lake_position, partitions))

        until(complete, waiting_for="`latest` to be refreshed", actors=[sync])

    def behind(self, bucket: Bucket) -> int:
        """The number of changes that the lake lacks, or has of a former history."""
        seqnos = bucket.seqnos()
        try:
            lake_position = Lake(self.lake).changes.lake_position
        except UpperError:
            return sum(seqnos.values())  # not made yet
        logs = bucket.failover_logs()
        distance = 0
        for partition, seqno in seqnos.items():
            at = lake_position.position(partition)
            shared = at.seqno == 0 or common_point([at], logs[partition], high=seqno) == at
            distance += seqno - at.seqno if shared else seqno + 1
        return distance

    def show_query(self, sql: str) -> None:
        for line in run("query", str(self.lake), sql).splitlines():
            self.note(line)

    def say(self, sentence: str) -> None:
        print(f"\n● {sentence}", flush=True)

    def note(self, line: str) -> None:
        print(f"    {line}", flush=True)


def rate(count: int, began: float) -> str:
    return f"{count / (time.monotonic() - began):,.0f} a second"


def passed(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"


def _all_in_sync(status: dict[str, Any]) -> bool:
    return all(len(entry["in_sync"]) == len(NODES) for entry in status["partitions"])


def relative(path: Path) -> str:
    """The path relative to the working directory, quoted for a shell."""
    return shlex.quote(os.path.relpath(path))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--directory", type=Path, default=Path(".demo"), help="where files go (.demo)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the generated data (7)")
    parser.add_argument("--keep", action="store_true", help="leave the nodes and the sync running")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not if nohup ignores the signal
            signal.signal(number, signal.default_int_handler)
    if still := running_in(args.directory):
        print(
            f"demo: an earlier one still runs there; stop it first: kill {' '.join(still)}", file=sys.stderr
        )
        return 1
    if not may_be_swept(args.directory):
        print(
            f"demo: {args.directory} holds something else; move that away, or name another --directory",
            file=sys.stderr,
        )
        return 1
    shutil.rmtree(args.directory, ignore_errors=True)
    args.directory.mkdir(parents=True)
    story = Story(args.directory.resolve(), seed=args.seed, keep=args.keep)
    kept = False
    try:
        story.tell()
        kept = args.keep
        return 0
    except (Trouble, UpperError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped; its processes are ended, its files stay", file=sys.stderr)
        return 130
    finally:
        story.end(keep=kept)
