"""Building and reading records: what goes in comes out, and the UPR table reads the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upper import kernel
from upper.model.messages import MutationMessage
from upper.record import change
from upper.record.layout import EXPIRATION, MAX_SEQNO
from upper.wire.upr import UPR

KEYS = st.binary(min_size=1, max_size=250)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SEQNOS = st.integers(1, MAX_SEQNO)
PARTITIONS = st.integers(0, 65535)


@given(PARTITIONS, KEYS, st.binary(max_size=60), SEQNOS, U64, U64, U32, U32, U32, st.integers(0, 255))
def test_a_mutation_reads_back_as_it_was_built(
    partition: int,
    key: bytes,
    value: bytes,
    seqno: int,
    revision: int,
    cas: int,
    flags: int,
    expiration: int,
    lock_time: int,
    data_type: int,
) -> None:
    record = change.mutation(
        partition,
        key,
        value,
        seqno=seqno,
        revision=revision,
        cas=cas,
        flags=flags,
        expiration=expiration,
        lock_time=lock_time,
        data_type=data_type,
    )
    item = change.item_of(record)
    assert item == (key, value, flags, expiration, cas, seqno, revision, lock_time, data_type, False)
    assert change.meta_of(record) == (cas, seqno, revision)
    assert change.tail_of(record) == (flags, expiration, lock_time)
    assert change.seqno_of(record) == seqno
    assert (change.key_of(record), record[change.value_at(record) :]) == (key, value)
    assert change.partition_of_record(record) == partition
    assert change.packet_end(b"12" + record, 2) == 2 + len(record) == 2 + item.record_size
    message = UPR.decode(record)
    assert isinstance(message, MutationMessage)
    assert (message.key, message.value, message.seqno, message.lock_time) == (key, value, seqno, lock_time)


@given(PARTITIONS, KEYS, SEQNOS, U64, U64)
def test_an_expiration_reads_back_as_it_was_built(
    partition: int, key: bytes, seqno: int, revision: int, cas: int
) -> None:
    record = change.deletion(partition, key, seqno=seqno, revision=revision, cas=cas, opcode=EXPIRATION)
    item = change.item_of(record)
    assert item.deleted
    assert item.record_size == len(record)
    assert (item.key, item.cas, item.seqno, item.revision) == (key, cas, seqno, revision)
    assert change.tail_of(record) == (0, 0, 0)
    assert change.without_value(record) is record


def test_a_record_without_its_value_keeps_everything_else() -> None:
    record = change.mutation(
        3, b"k", b"value", seqno=9, revision=2, cas=7, flags=5, expiration=6, data_type=1
    )
    assert change.without_value(record) == change.mutation(
        3, b"k", b"", seqno=9, revision=2, cas=7, flags=5, expiration=6
    )


def test_a_received_packet_is_stored_with_opaque_0_in_the_partition_that_it_is_stored_in() -> None:
    record = change.mutation(3, b"k", b"v", seqno=9, revision=2, cas=7)
    packet = kernel.join([change.mutation(8, b"k", b"v", seqno=9, revision=2, cas=7)], 0xDEADBEEF)
    assert packet[12:16] == b"\xde\xad\xbe\xef"
    assert change.as_stored(packet, 3) == record
    assert change.as_stored(record, 3) is record
