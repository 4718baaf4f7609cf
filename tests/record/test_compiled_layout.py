"""The layout of a record is stated once: the compiled kernel and the tables of `wire` agree with `record`."""

from __future__ import annotations

import importlib.util

import pytest

from upper.kernel import packets, plain_fanout
from upper.kernel import plain_commands as commands
from upper.kernel import plain_run as run
from upper.model.messages import (
    DeletionMessage,
    ExpirationMessage,
    MutationMessage,
    SeqnoAdvanced,
    SnapshotMarker,
    Tap,
)
from upper.record import layout, location
from upper.record.change import mutation
from upper.wire import extras
from upper.wire.codes import DcpForm, Opcode, TapMark
from upper.wire.dcp import DCP
from upper.wire.stream_encoder import MEMORY
from upper.wire.tap import TAP
from upper.wire.upr import UPR

BUILT = importlib.util.find_spec("upper.kernel._compiled") is not None
needs_kernel = pytest.mark.skipif(not BUILT, reason="the compiled kernel was not built; run `make kernel`")


def stated() -> dict[str, int]:
    """Every number that the compiled kernel repeats, where it is declared."""
    numbers = {
        name: int(value)
        for name, value in vars(layout).items()
        if name.startswith("AT_")
        or name.endswith(("_EXTRAS", "_HEAD"))
        or name in ("HEADER_SIZE", "REQUEST", "RESPONSE", "MUTATION", "DELETION", "EXPIRATION", "FLUSH")
        or name in ("SNAPSHOT_START", "SNAPSHOT_END")
        if isinstance(value, int)
    }
    requests = set(commands.COUNTERS + commands.EXTENDS + commands.GATS + run.SETS + run.DELETES + run.GETS)
    requests |= {run.NOOP, run.SET_WITH_META, commands.TOUCH, commands.GET_LOCKED, commands.UNLOCK_KEY}
    numbers |= {Opcode(number).name: number for number in requests}
    (mutation,) = packets.DCP_EXTRAS[layout.MUTATION]
    with_meta, deleted_at = packets.DCP_EXTRAS[layout.DELETION]
    _, expired_at = packets.DCP_EXTRAS[layout.EXPIRATION]
    return numbers | {
        "MAX_KEY": layout.MAX_KEY,
        "SEQNO_SHIFT": location.SEQNO_SHIFT,
        "LENGTH_BITS": location.LENGTH_BITS,
        "BETWEEN": packets.BETWEEN,
        "INSIDE": packets.INSIDE,
        "AT_DCP_META": packets.AT_DCP_META,
        "DCP_MUTATION_EXTRAS": mutation,
        "DCP_GONE_EXTRAS": with_meta,
        "DCP_DELETION_EXTRAS": deleted_at,
        "DCP_EXPIRATION_EXTRAS": expired_at,
        "DELETE_TIMES": DcpForm.DELETE_TIMES,
        "EXPIRATIONS": DcpForm.EXPIRATIONS,
        "DATA_TYPES": DcpForm.DATA_TYPES,
        "NANOSECONDS": packets.NANOSECONDS,
        "DCP_MARKER": DCP.opcode(SnapshotMarker),
        "DCP_MARKER_EXTRAS": DCP.layout(SnapshotMarker).size,
        "DCP_IN_MEMORY": MEMORY,
        "SEQNO_ADVANCED": UPR.opcode(SeqnoAdvanced),
        "ADVANCED_EXTRAS": UPR.layout(SeqnoAdvanced).size,
        "TAP_MUTATION": TAP.opcode(MutationMessage),
        "TAP_DELETION": TAP.opcode(DeletionMessage),
        "TAP_MUTATION_EXTRAS": TAP.layout(MutationMessage).size,
        "TAP_DELETION_EXTRAS": TAP.layout(DeletionMessage).size,
        "AT_TAP_MARKS": TAP.layout(DeletionMessage).span("tap_flags")[0],
        "AT_TAP_HOPS": TAP.layout(DeletionMessage).span("ttl")[0],
        "TAP_HOPS": Tap().ttl,
        "TAP_ACK": TapMark.ACK,
        "TAP_NO_VALUE": TapMark.NO_VALUE,
        "ALL_OPERATIONS": plain_fanout.ALL_OPERATIONS,
        "STORE_EXTRAS": extras.STORE.size,
        "COPY_EXTRAS": extras.WITH_META.size + extras.OPTIONS.size,
        "FLAGS_EXTRAS": extras.FLAGS.size,
        "COUNT_EXTRAS": extras.COUNT.size,
        "TOUCH_EXTRAS": extras.EXPIRATION.size,
        "TOKEN_EXTRAS": extras.TOKEN.size,
        "MONTH": extras.MONTH,
        "DEFAULT_LOCK": extras.DEFAULT_LOCK,
    }


@needs_kernel
def test_the_compiled_kernel_has_the_numbers_of_the_layout() -> None:
    from upper.kernel import _compiled

    assert stated() == _compiled.LAYOUT


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("seqno", layout.AT_SEQNO),
        ("revision", layout.AT_REVISION),
        ("flags", layout.AT_FLAGS),
        ("expiration", layout.AT_EXPIRATION),
        ("lock_time", layout.AT_LOCK_TIME),
    ],
)
def test_a_mutation_of_the_upr_table_has_its_fields_where_a_record_has_them(name: str, at: int) -> None:
    assert layout.HEADER_SIZE + UPR.layout(MutationMessage).span(name)[0] == at


def test_the_upr_and_dcp_tables_have_the_sizes_of_records() -> None:
    assert UPR.layout(MutationMessage).size == layout.MUTATION_EXTRAS
    assert UPR.layout(DeletionMessage).size == UPR.layout(ExpirationMessage).size == layout.DELETION_EXTRAS
    for message, opcode in (
        (MutationMessage, layout.MUTATION),
        (DeletionMessage, layout.DELETION),
        (ExpirationMessage, layout.EXPIRATION),
    ):
        assert [row.opcode for row in UPR.rows[message]] == [opcode]
        assert tuple(row.extras.size for row in DCP.rows[message]) == packets.DCP_EXTRAS[opcode]


def test_the_struct_formats_have_the_sizes_of_the_offsets() -> None:
    assert layout.HEADER.size == layout.HEADER_SIZE
    assert layout.HEAD.size == layout.DELETION_HEAD
    assert layout.LIVE_HEAD.size == layout.MUTATION_HEAD


def test_the_largest_record_fits_into_a_location() -> None:
    assert layout.HEADER_SIZE + layout.MAX_BODY <= location.MAX_LENGTH
    place = location.location(layout.MAX_SEQNO, location.MAX_SLOT, location.MAX_OFFSET, location.MAX_LENGTH)
    assert (
        location.seqno_at(place),
        location.slot_at(place),
        location.offset_at(place),
        location.length_at(place),
    ) == (layout.MAX_SEQNO, location.MAX_SLOT, location.MAX_OFFSET, location.MAX_LENGTH)
    assert place < location.location(layout.MAX_SEQNO + 1, 0, 0, 0)


@pytest.mark.parametrize(
    "module", ["upper.kernel.plain", pytest.param("upper.kernel._compiled", marks=needs_kernel)]
)
def test_both_kernels_find_entries_behind_a_seqno_by_their_location(module: str) -> None:
    records = importlib.import_module(module).RecordMap()
    places = [location.location(seqno, 1, 5, 60) for seqno in (3, 4, 5)]
    for key, place in zip((b"a", b"b", b"c"), places, strict=True):
        seqno = location.seqno_at(place)
        records.put(mutation(0, key, b"value", seqno=seqno, revision=1, cas=1))
        assert records.move_out(key, seqno, place)
    assert records.after(3).take(1000) == places[1:]
