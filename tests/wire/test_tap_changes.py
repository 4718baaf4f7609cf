"""A stored change becomes the TAP message that the table of the dialect would make of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.model.messages import DeletionMessage, MutationMessage, Tap
from upper.model.values import Cas, Partition
from upper.record.change import deletion, mutation
from upper.wire.tap import TAP, tap_change

NUMBERS = st.integers(0, 2**32 - 1)


@given(
    key=st.binary(min_size=1, max_size=250),
    value=st.binary(max_size=300),
    flags=NUMBERS,
    expiration=NUMBERS,
    cas=st.integers(0, 2**64 - 1),
    opaque=NUMBERS,
    ack=st.booleans(),
    bare=st.booleans(),
    data_type=st.integers(0, 7),
)
def test_a_mutation_is_encoded_as_the_table_declares(
    key: bytes,
    value: bytes,
    flags: int,
    expiration: int,
    cas: int,
    opaque: int,
    ack: bool,
    bare: bool,
    data_type: int,
) -> None:
    record = mutation(
        1023, key, value, seqno=9, revision=3, cas=cas, flags=flags, expiration=expiration,
        data_type=data_type, lock_time=77,
    )  # fmt: skip
    message = MutationMessage(
        partition=Partition(1023),
        key=key,
        value=b"" if bare else value,
        cas=Cas(cas),
        flags=flags,
        expiration=expiration,
        opaque=opaque,
        request_ack=ack,
        data_type=0 if bare else data_type,
        tap=Tap(no_value=True) if bare else None,
    )
    assert tap_change(record, opaque, ack=ack, value=not bare) == TAP.encode(message)


@pytest.mark.parametrize("ack", [False, True])
@pytest.mark.parametrize("value", [False, True])
def test_a_deletion_is_encoded_as_the_table_declares(ack: bool, value: bool) -> None:
    record = deletion(3, b"key", seqno=9, revision=3, cas=7)
    message = DeletionMessage(partition=Partition(3), key=b"key", cas=Cas(7), opaque=5, request_ack=ack)
    assert tap_change(record, 5, ack=ack, value=value) == TAP.encode(message)
