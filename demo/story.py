"""`make demo`: a shop, a node, a lake, and a plug that is pulled.

The story, in order: a node takes a shop's data; Spark keeps a lake of it; changes arrive while the shop
trades; the node is killed and comes back, first with everything, then as a node that lagged behind would:
with less. The lake follows, keeps what was taken back, and is compared with the bucket, byte by byte.

Same seed, same story: what is written, taken back and kept is decided by it. Times are the machine's, and
so is how often the lake sees a key that changes quickly on its way.
"""

from __future__ import annotations

import argparse
import copy
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import upper
from demo.shop import Shop, Write
from demo.stage import Actor, Guard, Trouble, chart, may_be_swept, remember, run, running_in, until
from upper.apps.lake.home import Lake
from upper.client.bucket import Bucket
from upper.errors import UpperError

PARTITIONS = 64
QUERIES = (
    "select operation, count(*) as changes from changes group by 1",
    "select text(value)->>'status' as status, count(*) from latest where text(key) like 'order:%' group by 1",
)


class Story:
    """One run of the demo; `directory` holds everything that it makes."""

    def __init__(self, directory: Path, *, seed: int, keep: bool) -> None:
        self.directory, self.seed, self.keep = directory, seed, keep
        self.node_data, self.lake = directory / "node", directory / "lake"
        self.shop = Shop(seed)
        self.actors: list[Actor] = []
        self.guard = Guard()
        self.port = 0
        self.changes = 0  # that the bucket has, or will have once abandoned carts are gone
        self.began = time.monotonic()

    @property
    def url(self) -> str:
        return f"upr://127.0.0.1:{self.port}/default"

    # ── The acts ──────────────────────────────────────────────────────────────────────────────────

    def tell(self) -> None:
        self.say(f"A tea shop keeps its users, carts and orders in a bucket of {PARTITIONS} partitions.")
        node = self.start_node()
        sync = self.start_sync()
        with upper.connect(self.url) as bucket:
            self.load(bucket)
            self.first_sync(bucket, sync)
            self.trade(bucket, sync, changes=3_000)
            calm = self.settle(bucket, node, sync)
            self.last_orders(bucket, orders=600)
            before = self.settle(bucket, node, sync)
        node = self.pull_the_plug(node, before)
        with upper.connect(self.url) as bucket:
            expected = self.fail_over(bucket, calm, before)
            self.write_on(bucket, changes=300)
            self.settle(bucket, node, sync)
            self.rolled_back(sync, expected)
            if not self.keep:
                sync.stop()
        self.prove()
        self.bow(node, sync)

    def load(self, bucket: Bucket) -> None:
        began = time.monotonic()
        self.write(bucket, self.shop.opening(users=2_000, orders=8_000))
        count = self.changes
        self.say(f"Loaded {count:,} documents, each on disk before it was confirmed ({rate(count, began)}).")

    def first_sync(self, bucket: Bucket, sync: Actor) -> None:
        self.note("Spark is starting, and reads what is there ...")
        self.wait_for_lake(bucket, sync)
        rows = sum(file.rows for file in Lake(self.lake).changes.files())
        self.say(f"The lake has all {rows:,} changes: tables `changes`, `latest` and `lost`, in Delta.")

    def trade(self, bucket: Bucket, sync: Actor, *, changes: int) -> None:
        """A writer works, in ten spells, and the lake follows."""
        writes = list(self.shop.trading(changes))
        deletes, left = sum(each.value is None for each in writes), sum(each.expiry > 0 for each in writes)
        self.say(f"The shop trades: {changes:,} writes while the lake follows, a commit about every second.")
        self.note(f"{deletes} orders are deleted; {left} carts are left behind, and expire by themselves")
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
        """What is going to be lost; the shop's own memory of the moment before is kept for later."""
        self.calm_shop = copy.deepcopy(self.shop)
        self.write(bucket, self.shop.rush(orders))
        self.say(
            f"Then a rush: {orders:,} new orders in the last minute before the accident. All reach the lake."
        )

    def pull_the_plug(self, node: Actor, before: Mapping[int, int]) -> Actor:
        node.kill()
        self.say("The plug is pulled: the node is killed, and started again.")
        node = self.start_node()
        with upper.connect(self.url) as bucket:
            after = bucket.seqnos()
        missing = sum(before.values()) - sum(after.values())
        if missing:
            raise Trouble(
                f"{missing} confirmed changes are missing after the kill; this is a bug, please report it"
            )
        self.note(f"all {sum(after.values()):,} changes are still there: what was confirmed was on disk")
        return node

    def fail_over(self, bucket: Bucket, calm: Mapping[int, int], before: Mapping[int, int]) -> int:
        """Each partition goes back to the calm point, as if a replica that lagged had taken over."""
        self.say("Now the worse accident: a failover to a copy that never saw the last minute.")
        self.note(f"upper promote {self.url} -p 0 --to {calm[0]}    (and so for every partition)")
        self.changes = sum(bucket.promote(partition, to=seqno).seqno for partition, seqno in calm.items())
        expected = sum(before.values()) - self.changes
        self.note(f"{expected:,} changes that the lake has already seen never happened, says the bucket")
        return expected

    def write_on(self, bucket: Bucket, *, changes: int) -> None:
        """The shop goes on from the calm point too, and takes other turns than before."""
        self.shop = self.calm_shop
        self.shop.turn(self.seed + 1)
        self.write(bucket, self.shop.trading(changes))

    def rolled_back(self, sync: Actor, expected: int) -> None:
        # `lost` has its commit right after the one that makes the lake stand where the bucket does.
        until(
            lambda: self.lost() >= expected, waiting_for="`lost` to be complete", actors=[sync], within=30.0
        )
        if (lost := self.lost()) != expected:
            raise Trouble(
                f"`lost` holds {lost} changes where {expected} were taken back; please report this bug"
            )
        partitions = len(Lake(self.lake).changes.stand.rollbacks)
        self.say(f"The lake noticed: {partitions} partitions went back, and the new history follows.")
        self.note(f"taken out of `changes` and `latest`, kept in `lost`: {lost:,} changes, as expected")

    def lost(self) -> int:
        return sum(file.rows for file in Lake(self.lake).lost.files())

    def prove(self) -> None:
        self.say("Orders that were placed, seen, and then never happened:")
        self.show_query(
            "select key, count(*) as changes from lost "
            "where text(key) like 'order:%' group by key order by key limit 4"
        )
        self.say("Is the lake what the bucket is? `upper verify` compares them, partition by partition:")
        for line in run("verify", self.url, str(self.lake)).splitlines():
            self.note(line)
        self.note("(a version that was overwritten before the lake looked is not among its changes)")

    def bow(self, node: Actor, sync: Actor) -> None:
        minutes, seconds = divmod(round(time.monotonic() - self.began), 60)
        command, lake = relative(Path(sys.executable).parent / "upper"), relative(self.lake)
        self.say(f"Done in {minutes} min {seconds:02} s. The lake stays, to be explored:")
        self.note(f"{command} lake {lake}")
        for query in QUERIES:
            self.note(f'{command} query {lake} "{query}"')
        if self.keep:
            self.say(f"Still running, as asked: the node at {self.url} and the sync. To stop them:")
            self.note(f"kill {sync.process.pid} {node.process.pid}")

    # ── The parts that several acts share ─────────────────────────────────────────────────────────

    def start_node(self) -> Actor:
        arguments = ["serve", "--json", "--data", str(self.node_data), "--port", str(self.port)]
        node = self.enter("node", [*arguments, "--partitions", str(PARTITIONS)])
        until(lambda: bool(node.lines()), waiting_for="the node to be ready", actors=[node])
        self.port = int(node.lines()[0]["port"])
        return node

    def start_sync(self) -> Actor:
        arguments = ["sync", self.url, str(self.lake), "--every", "1s", "--latest-every", "5s", "--json"]
        return self.enter("sync", arguments)

    def enter(self, name: str, arguments: Sequence[str]) -> Actor:
        actor = Actor(name, arguments, directory=self.directory, guard=self.guard)
        self.actors.append(actor)
        remember(actor, self.directory)
        return actor

    def end(self, *, keep: bool) -> None:
        """The end of the demo: with it, or not, the end of everybody in it."""
        if keep:
            self.guard.tell("keep")
        else:
            for actor in reversed(self.actors):
                actor.stop(within=20.0)
        self.guard.leave()

    def write(self, bucket: Bucket, writes: Iterable[Write]) -> None:
        """Do what the shop says, in its order, plain writes together."""
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

    def settle(self, bucket: Bucket, node: Actor, sync: Actor) -> dict[int, int]:
        """Wait until abandoned carts are gone and the lake has everything; where the bucket stands."""
        until(
            lambda: sum(bucket.seqnos().values()) >= self.changes,
            waiting_for="abandoned carts to expire",
            actors=[node],
        )
        self.wait_for_lake(bucket, sync)
        return {int(partition): int(seqno) for partition, seqno in bucket.seqnos().items()}

    def wait_for_lake(self, bucket: Bucket, sync: Actor) -> None:
        until(
            lambda: self.behind(bucket) == 0, waiting_for="the lake to catch up", actors=[sync], within=300.0
        )

    def behind(self, bucket: Bucket) -> int:
        """How many changes the lake has not committed, or has of a history that is gone."""
        seqnos = bucket.seqnos()
        try:
            stand = Lake(self.lake).changes.stand
        except UpperError:
            return sum(seqnos.values())  # not made yet
        logs = bucket.failover_logs()
        distance = 0
        for partition, seqno in seqnos.items():
            at = stand.position(partition)
            distance += abs(seqno - at.seqno) or (seqno > 0 and at.branch != logs[partition].branch)
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


def relative(path: Path) -> str:
    """The path as one would type it here."""
    return shlex.quote(os.path.relpath(path))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--directory", type=Path, default=Path(".demo"), help="where everything goes (.demo)")
    parser.add_argument("--seed", type=int, default=7, help="another seed, another story (7)")
    parser.add_argument("--keep", action="store_true", help="leave the node and the sync running")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not where nohup says otherwise
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
