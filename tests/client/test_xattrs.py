"""Extended attributes: kept beside the value, which is the document alone.

No command of a node stores them, so the test writes values as Couchbase sends them into the store of a node,
and reads them over a socket: data type and bytes arrive as they would from Couchbase.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import upper
from tests.server.inside import Running
from upper.client.bulk import ColumnDecoder
from upper.client.decode import StreamFramer
from upper.client.follow import Follower
from upper.client.partition_consumer import PartitionConsumer
from upper.client.position_codec import ResumePoints
from upper.client.routes import Routes
from upper.client.url import NodeAddress
from upper.errors import BadLength
from upper.model import messages
from upper.model.values import FailoverLog, Partition, Seqno, Version, partition_of
from upper.record.layout import U32
from upper.wire.dcp import DCP
from upper.wire.xattrs import as_json, split

ATTRIBUTES = {"_sync": b'{"rev":"1-ab"}', "owner": b'"ann"'}
JSON, XATTR = 0x01, 0x04


def join(attributes: Mapping[str, bytes], document: bytes) -> bytes:
    """A value with its attributes in front, as Couchbase writes it."""
    pairs = [name.encode() + b"\0" + content + b"\0" for name, content in attributes.items()]
    packed = b"".join(U32.pack(len(pair)) + pair for pair in pairs)
    return U32.pack(len(packed)) + packed + document


names = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20)
contents = st.binary(max_size=40).filter(lambda content: b"\0" not in content)


@given(st.dictionaries(names, contents, max_size=4), st.binary(max_size=60))
def test_what_was_joined_is_split_again(attributes: dict[str, bytes], document: bytes) -> None:
    assert split(join(attributes, document)) == (attributes, document)


@given(st.dictionaries(names, contents, min_size=1, max_size=3), st.integers(min_value=0))
def test_attributes_that_are_cut_off_are_refused(attributes: dict[str, bytes], cut: int) -> None:
    whole = join(attributes, b"")
    with pytest.raises(BadLength):
        split(whole[: cut % len(whole)])


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_split_or_refused(value: bytes) -> None:
    try:
        attributes, document = split(value)
    except BadLength:
        return
    assert value.endswith(document)
    assert all(content in value for content in attributes.values())


contents_or_json = contents | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=3), of, max_size=3),
    max_leaves=4,
).map(lambda value: json.dumps(value).encode())


@given(st.dictionaries(names, contents_or_json, max_size=4))
def test_as_json_the_attributes_are_one_object_with_their_values(attributes: dict[str, bytes]) -> None:
    found = json.loads(as_json(attributes))
    assert list(found) == list(attributes)
    for name, content in attributes.items():
        try:
            expected = json.loads(content.decode())
        except ValueError:
            expected = content.decode(errors="replace")
        assert found[name] == expected


def write_documents(running: Running) -> None:
    """`with` has attributes and `without` has none."""
    partitions = running.bucket.partitions

    def write() -> None:
        for key, value, kind in (
            (b"with", join(ATTRIBUTES, b'{"a": 1}'), JSON | XATTR),
            (b"without", b"{}", JSON),
        ):
            partitions[partition_of(key, len(partitions))].write(key, value, data_type=kind)

    running.call(write)
    running.call(running.bucket.commit)


def test_a_follower_gets_the_document_and_its_attributes(tmp_path: Path) -> None:
    with Running(tmp_path / "data") as running:
        write_documents(running)
        with upper.connect(f"couchbase://127.0.0.1:{running.port}/default") as bucket:
            changes = [event for event in bucket.changes(until="now") if isinstance(event, upper.Mutation)]
            batches = list(bucket.changes_arrow(until="now"))
    assert sorted((event.key, event.value, event.xattrs, event.data_type) for event in changes) == [
        (b"with", b'{"a": 1}', ATTRIBUTES, JSON),
        (b"without", b"{}", None, JSON),
    ]
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert sorted((row["key"], row["value"], row["xattrs"], row["data_type"]) for row in rows) == [
        (b"with", b'{"a": 1}', as_json(ATTRIBUTES), JSON),
        (b"without", b"{}", None, JSON),
    ]


def test_the_attributes_of_deletions_are_kept() -> None:
    log = FailoverLog((Version(upper.BranchId(9), Seqno(0)),))
    here = Partition(5)

    def consumer() -> PartitionConsumer:
        return PartitionConsumer(here, ResumePoints(log, (Seqno(1),)), bounds=True)

    of: dict[str, Any] = {"partition": here, "opaque": 5}
    marker = messages.SnapshotMarker(start=Seqno(1), end=Seqno(3), **of)
    gone = join(ATTRIBUTES, b"")
    deletions = [
        messages.DeletionMessage(key=b"d", seqno=Seqno(2), value=gone, data_type=XATTR, deleted_at=9, **of),
        messages.DeletionMessage(key=b"e", seqno=Seqno(3), deleted_at=9, **of),
    ]
    data = b"".join(map(DCP.encode, deletions))
    one = consumer()
    one.open()
    one.on_accepted(log.versions)
    one.on(marker)
    events = list(StreamFramer().typed(data, {here: one}, DCP))
    found = [event.xattrs for event in events if isinstance(event, upper.Deletion)]
    assert found == [ATTRIBUTES, None]

    node = NodeAddress("a")
    follower = Follower([consumer()], Routes((node,), (0,) * 8, 1), dialect=DCP, random=lambda: 0.5)
    decoder = ColumnDecoder(follower)
    follower.opened(node, 0.0)
    accepted = messages.StreamAccepted(opaque=5, versions=log.versions)
    sent = DCP.encode(accepted) + DCP.encode(marker) + data
    (batch,) = decoder.received(node, sent, 0.0)
    assert not isinstance(batch, upper.Rollback)
    rows = [(row["operation"], row["value"], row["xattrs"]) for row in batch.to_pylist()]
    assert rows == [("deletion", None, as_json(ATTRIBUTES)), ("deletion", None, None)]
