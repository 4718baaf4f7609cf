"""A commit in the forms of its streams: dialects, filters by key and operation, keys without values."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import EXPIRATION, FLUSH, MUTATION, Store, change, changes, packet
from upper.kernel import plain
from upper.model.values import Partition, Seqno, Snapshot
from upper.record.change import key_of
from upper.server.filters import EVERYTHING, Filter
from upper.wire.codes import DcpForm
from upper.wire.dcp import DCP
from upper.wire.stream_encoder import stream_encoder
from upper.wire.table import Dialect
from upper.wire.tap import tap_change
from upper.wire.upr import UPR

DCP_FORMS = [
    int(DcpForm.PLAIN),
    int(DcpForm.PLAIN | DcpForm.DATA_TYPES),
    int(DcpForm.DELETE_TIMES | DcpForm.EXPIRATIONS | DcpForm.DATA_TYPES),
    int(DcpForm.DELETE_TIMES),
]


def tail(kernel: ModuleType, *, high: int = 0) -> Any:
    """A tail whose streams have been sent nothing of a partition that is at `high`."""
    made = kernel.TailProgress(Store(), replicas=True)
    made.store.written = high
    return made


def form_of(kernel: ModuleType, chosen: Filter, dcp: int) -> Any:
    return kernel.StreamForm(
        3,
        dcp=dcp,
        keys_only=chosen.keys_only,
        prefix=chosen.prefix,
        operations=chosen.operation_bits,
        matches=chosen.matches,
    )


@pytest.mark.parametrize("dialect", [UPR, DCP])
@pytest.mark.parametrize(
    "chosen",
    [
        EVERYTHING.with_keys_only(),
        EVERYTHING.with_prefix(b"a"),
        EVERYTHING.with_operations("deletion, expiration"),
        EVERYTHING.with_pattern("^.b").with_prefix(b"a").with_keys_only(),
    ],
    ids=str,
)
@given(records=st.lists(changes(partitions=3), min_size=1, max_size=12))
def test_a_commit_is_framed_as_its_records_are_filtered_and_encoded_one_by_one(
    kernel: ModuleType, dialect: Dialect, chosen: Filter, records: list[bytes]
) -> None:
    """SEQNO_ADVANCED has the last seqno where its record is left out."""
    for form in (0,) if dialect is UPR else DCP_FORMS:
        encoder = stream_encoder(dialect, plain.join, form)
        tails = [tail(kernel, high=5) for _ in range(3)]
        reached = min(int.from_bytes(record[24:32], "big") for record in records)
        for one in tails:
            one.reached = reached
        cut = kernel.CommitGroups(kernel.Log(records), tails)
        expected, count = b"", 0
        for partition in dict.fromkeys(record[7] for record in records):
            newest = plain.latest([record for record in records if record[7] == partition])
            sent, end = chosen(newest), int.from_bytes(newest[-1][24:32], "big")
            bounds = Snapshot(Seqno(reached), Seqno(end))
            expected += encoder.snapshot_start(partition, 7, bounds) + encoder.records(sent, 7)
            if not sent or key_of(sent[-1]) != key_of(newest[-1]):
                expected += encoder.advance(Partition(partition), 7, Seqno(end))
            expected += encoder.snapshot_end(partition, 7)
            count += len(sent)
        made, slots = form_of(kernel, chosen, form), array("q", [7, 7, 7])
        assert cut.measure(slots, made) == (len(expected), count)
        assert cut.frame(slots, made) == expected


@pytest.mark.parametrize("keys_only", [False, True])
@given(records=st.lists(changes(partitions=3), min_size=1, max_size=30), every=st.integers(0, 4))
def test_a_commit_is_framed_as_the_encoder_of_tap_encodes_it(
    kernel: ModuleType, keys_only: bool, records: list[bytes], every: int
) -> None:
    """Numbered behind the last number, which wraps around; each `every`th message requests an answer."""
    tails = [tail(kernel, high=5) for _ in range(3)]
    tails[1].store.branch = 77
    cut = kernel.CommitGroups(kernel.Log(records), tails)
    form = kernel.StreamForm(3, tap=True, keys_only=keys_only)
    before = 0xFFFF_FFFE
    slots = array("q", [0, 1, -1])
    framed, asked, rest = cut.frame_tap(slots, form, before, every=every, since=1)
    groups = {
        p: plain.latest([r for r in records if r[7] == p]) for p in dict.fromkeys(r[7] for r in records)
    }
    groups.pop(2, None)
    sent = [record for some in groups.values() for record in some]
    expected, since, asks = b"", 1, []
    for number, record in enumerate(sent, 1):
        opaque, since = before + 1 if number == 1 else number - 1, since + 1
        ask = 0 < every <= since
        expected += tap_change(record, opaque, ack=ask, value=not keys_only)
        if ask:
            asks.append((opaque, number))
            since = 0
    assert framed == expected
    assert cut.measure(slots, form) == (len(expected), len(sent))
    assert [(opaque, number) for opaque, number, _ in asked] == asks
    covered: dict[int, tuple[int, ...]] = {}
    for _, number, progress in [*asked, (0, len(sent), rest)]:
        covered.update(progress)
        for partition, some in groups.items() if every else ():
            first = sent.index(some[0])
            branch, seqnos = 77 * (partition == 1), [int.from_bytes(one[24:32], "big") for one in some]
            if number > first:
                assert covered[partition][0] == branch
                assert covered[partition][1] == seqnos[min(number - first, len(some)) - 1]
                assert covered[partition][3] == seqnos[-1]
    cut.advance()
    size = sum(len(tap_change(one, 1, value=not keys_only)) for one in groups.get(0, []))
    assert form.counted(0) == (len(groups.get(0, [])), size)


def test_a_key_is_not_continued_by_its_value(kernel: ModuleType) -> None:
    """The prefix `ab` selects the key `ab`, and not the key `a` with the value `b`."""
    tails = [tail(kernel, high=5)]
    records = [change(b"a", b"bc", seqno=1), change(b"ab", b"", seqno=2)]
    cut = kernel.CommitGroups(kernel.Log(records), tails)
    form = kernel.StreamForm(1, prefix=b"ab")
    assert cut.measure(array("q", [0]), form)[1] == 1
    assert EVERYTHING.with_prefix(b"ab")(records) == records[1:]


@pytest.mark.parametrize(
    ("options", "record", "why"),
    [
        ({"dcp": 1}, packet(0x64), "have a form in DCP"),
        ({"tap": True}, packet(FLUSH), "have a form in TAP"),
        ({"tap": True}, packet(MUTATION, extras=bytes(16), key=b"k"), "not a record"),
        ({"tap": True}, packet(EXPIRATION, extras=bytes(16), key=b"k", value=b"v"), "not a record"),
    ],
)
def test_a_record_without_a_form_is_refused(
    kernel: ModuleType, options: dict[str, Any], record: bytes, why: str
) -> None:
    cut = kernel.CommitGroups(kernel.Log([record]), [tail(kernel)])
    form = kernel.StreamForm(1, **options)
    numbered = {"opaque": 1, "every": 0, "since": 0} if "tap" in options else {}
    frame = cut.frame_tap if numbered else cut.frame
    with pytest.raises(ValueError, match=why):
        frame(array("q", [0]), form, **numbered)
    with pytest.raises(ValueError, match="partition 1 cannot be here"):
        form.counted(1)


def test_an_error_of_a_key_pattern_is_passed_on(kernel: ModuleType) -> None:
    cut = kernel.CommitGroups(kernel.Log([change(b"a")]), [tail(kernel)])
    with pytest.raises(ZeroDivisionError):
        cut.frame(array("q", [0]), kernel.StreamForm(1, matches=lambda key: len(key) // 0))
    assert cut.advance() == []


def test_a_form_is_that_of_one_dialect(kernel: ModuleType) -> None:
    cut, slots = kernel.CommitGroups(kernel.Log([change(b"a")]), [tail(kernel)]), array("q", [0])
    refused: list[Callable[[], object]] = [
        lambda: kernel.StreamForm(1, dcp=1, tap=True),
        lambda: cut.frame(slots, kernel.StreamForm(1, tap=True)),
        lambda: cut.frame_tap(slots, kernel.StreamForm(1), 1, every=0, since=0),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="a form is that of UPR, of DCP or of TAP"):
            call()
