"""Whatever a call took, it gives back: buffers, references, memory; also when it refuses."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from array import array
from types import ModuleType

from tests.kernel.packets import DELETE, GET, NOOP, Clock, Store, change, numbers, packet, set_
from upper.errors import UpperError


def work(kernel: ModuleType) -> None:
    records = [change(b"k%d" % n, b"v" * 50 if n % 3 else None, seqno=n + 1) for n in range(50)]
    data = bytearray(kernel.join(records, 7))
    broken = bytes(data) + packet(0x54)[:-1]
    wrong = bytes(data) + b"\x00" * 30
    traffic = b"".join(set_(b"k%d" % (n % 9), b"v") + packet(GET, key=b"k1") for n in range(50))
    traffic += packet(DELETE, key=b"k1") + packet(NOOP) + packet(0x07, key=b"a")
    items = kernel.RecordMap()
    for record in records + [change(b"large", bytes(n), seqno=n) for n in range(990, 1060)]:
        items.put(record)
    kernel.scan(data, 0, numbers(0, 0))
    kernel.run(traffic, 0, [Store()], Clock(), kernel.Log(), bytearray())
    kernel.replay(data, 0, len(data), [kernel.RecordMap()], numbers(0))
    kernel.columns(data, 0, len(data), numbers(1))
    kernel.records(data, 0, len(data))
    kernel.join(records, 1, dcp=True)
    kernel.retarget(data, 0, len(data), 9)
    view = items.after(20)
    items.move_out(b"large", 1059, 1059 << 80 | 100)
    for one in (view, items.after(0)):
        one.places(), one.deletions(), one.take(1000)
    view.join(2000, 1, dcp=1)
    items.expiring(), items.some_keys(1, 5), items.forget(b"k1", 2), items.get(b"k2")
    log = kernel.Log([*records * 2, packet(0x54), change(b"large", bytes(20_000), seqno=51)])
    list(log), log.changes(), log.without(0), log.partitions(), log.payload(), copy.deepcopy(log)
    with contextlib.suppress(ValueError):
        log.append(records[0][:-1])
    cut = kernel.CommitGroups(log.changes(), [kernel.TailProgress(Store(), replicas=False)])
    forms = [
        kernel.StreamForm(1),
        kernel.StreamForm(1, dcp=3, prefix=b"k1", matches=lambda key: key != b"k11"),
        kernel.StreamForm(1, keys_only=True, operations=5),
    ]
    cut.take_flushed(), [cut.frame(array("q", [5]), form) for form in forms]
    cut.frame_tap(array("q", [5]), kernel.StreamForm(1, tap=True), 9, every=3, since=1)
    with contextlib.suppress(ZeroDivisionError):
        cut.frame(array("q", [5]), kernel.StreamForm(1, matches=lambda key: 1 / 0))
    cut.ends(), cut.of({0}), cut.advance(), forms[0].counted(0)
    progress = kernel.CopyProgress()
    for node in (f"{len(data)} a", f"{len(data)} b"):
        progress.waited_for = frozenset((node,))
        (
            progress.hold(node, 5),
            progress.set_silent(node, 1.0),
            progress.tracked(),
            progress.held_by(node + "?"),
        )
    kernel.latest(records * 2)
    for bad in (broken, wrong, bytearray(wrong)):
        with contextlib.suppress(UpperError):
            kernel.scan(bad, 0, numbers())
        with contextlib.suppress(UpperError):
            kernel.columns(bad, 0, len(bad), numbers(1))
        with contextlib.suppress(UpperError):
            kernel.records(bad, 0, len(bad))
        with contextlib.suppress(AttributeError, TypeError):
            kernel.run(
                set_(b"a", b"1") + set_(b"b", b"1", partition=1),
                0,
                [Store(), 5],
                Clock(),
                kernel.Log(),
                bytearray(),
            )
    data.clear()  # a buffer that was not given back would refuse this


def test_calls_leave_no_memory_behind(kernel: ModuleType) -> None:
    def blocks(rounds: int) -> int:
        for _ in range(rounds):
            work(kernel)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks(20)
    assert blocks(200) - before < 100  # a leaked object a call would be hundreds
