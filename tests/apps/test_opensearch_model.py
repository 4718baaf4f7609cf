"""An index compared with a bucket that keeps its history: rollbacks, and crashes between any two steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.push_story import PARTITIONS, Steps, Story, live_through, stories
from tests.apps.replica_model import ReplicaBucket
from upper.apps.push import state as states
from upper.apps.push.opensearch import (
    OURS,
    ForeignDocuments,
    IndexOptions,
    IndexTarget,
    document,
    id_of,
    key_of,
    version,
)
from upper.apps.push.search_engine import ABSENT, BAD, CONFLICT, DocumentWrite, StoredDocument, WriteOutcome
from upper.apps.push.tasks import AnotherWriter, HeldState, Save, TargetUnavailable
from upper.errors import BadCheckpoint
from upper.model.values import Partition

OPTIONS = IndexOptions("shop", "test", PARTITIONS)


class ModelEngine:
    """Indexes as dictionaries, with the rule of external versions; each operation is a step."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, tuple[int, bytes | None]]] = {}
        self.made = 0
        self.made_at: dict[str, int] = {}
        self.step = Steps()
        self.refused: set[bytes] = set()  # sources that the index does not take

    def prepare(self, index: str, definition: Mapping[str, Any]) -> None:
        self.step()
        if index not in self.documents:
            self.documents[index] = {}
            self.made += 1
            self.made_at[index] = self.made

    def drop(self, index: str) -> None:
        del self.documents[index], self.made_at[index]

    def identity(self, index: str) -> str:
        return str(self.made_at.get(index, ""))

    def bulk(self, index: str, operations: Sequence[DocumentWrite]) -> list[WriteOutcome]:
        return [self._one(self.documents[index], each) for each in operations]

    def _one(self, held: dict[str, tuple[int, bytes | None]], operation: DocumentWrite) -> WriteOutcome:
        self.step()
        known, source = held.get(operation.id, (0, None))
        wanted = known + 1 if operation.version is None else operation.version
        if operation.source is not None and any(part in operation.source for part in self.refused):
            return WriteOutcome(BAD, "it is not taken")
        if wanted <= known:
            return WriteOutcome(CONFLICT, "there is a newer version")
        held[operation.id] = (wanted, operation.source)
        self.step()
        return WriteOutcome(ABSENT if operation.source is None and source is None else 200)

    def get(self, index: str, ids: Sequence[str]) -> dict[str, StoredDocument]:
        found = {id_: self.documents[index].get(id_, (0, None)) for id_ in ids}
        return {
            id_: StoredDocument(number, json.loads(source))
            for id_, (number, source) in found.items()
            if source is not None
        }

    def find(self, index: str, terms: Mapping[str, str | int], *, by: str) -> Iterator[str]:
        for id_, about in self.live(index).items():
            about = about.get(OURS, {})
            if all(about.get(name.removeprefix(f"{OURS}.")) == each for name, each in terms.items()):
                yield id_

    def live(self, index: str) -> dict[str, dict[str, Any]]:
        held = self.documents[index]
        return {id_: json.loads(source) for id_, (_, source) in held.items() if source is not None}

    def versions(self) -> dict[bytes, tuple[int, int]]:
        """(revision, cas) of each document."""
        return {
            key_of(id_): (int(found[OURS]["revision"]), int(found[OURS]["cas"]))
            for id_, found in self.live(OPTIONS.index).items()
        }

    def another(self) -> ModelEngine:
        return self

    def close(self) -> None:
        pass


def versions(source: ReplicaBucket) -> dict[bytes, tuple[int, int]]:
    return {key: version[:2] for key, version in source.live().items()}


SET, BACK = ("mutation", b"a", 0), ("promote", b"a", 2)
LOST_HIGHER: Story = [([SET] * 2, [], [], None), ([SET] * 2, [], [], None), ([BACK], [], [], None)]
# The first filling finds nothing, because of a flush, and a failover takes the flush back.
FLUSHED_FIRST: Story = [([SET, ("flush", b"a", 0)], [], [], None), ([("promote", b"a", 1)], [], [], None)]


@pytest.mark.timeout(300)
@settings(max_examples=80)
@given(stories)
@example(LOST_HIGHER)
@example(FLUSHED_FIRST)
def test_an_index_ends_equal_to_the_source_whatever_happened_on_the_way(story: Story) -> None:
    source, engine = ReplicaBucket(PARTITIONS, first_cas=1000), ModelEngine()
    live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, story)
    assert engine.versions() == versions(source)


@pytest.mark.timeout(300)
@settings(max_examples=40)
@given(stories, st.integers(1, 3))
def test_an_index_with_a_record_that_is_too_small_is_compared(story: Story, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "SLOTS", size)
        patch.setattr(states, "SLOT_BYTES", 30)
        source, engine = ReplicaBucket(PARTITIONS, first_cas=1000), ModelEngine()
        live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, story)
        assert engine.versions() == versions(source)


@pytest.mark.timeout(300)
@settings(max_examples=40)
@given(stories, stories, st.data())
def test_an_index_that_was_made_anew_or_restored_is_brought_to_the_source(
    story: Story, later: Story, data: st.DataObject
) -> None:
    source, engine = ReplicaBucket(PARTITIONS, first_cas=1000), ModelEngine()

    def follow(story: Story) -> None:
        live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, story)

    follow(story)
    older = dict(engine.documents[OPTIONS.index])
    follow(later)
    engine.drop(OPTIONS.index)
    if data.draw(st.booleans(), "restored"):
        engine.prepare(OPTIONS.index, {})
        engine.documents[OPTIONS.index] = older
    follow([([], [], [], None)])
    assert engine.versions() == versions(source)


@pytest.mark.timeout(300)
@settings(max_examples=40)
@given(stories)
def test_documents_that_are_not_taken_leave_no_older_version_and_hold_up_nothing(story: Story) -> None:
    source, engine = ReplicaBucket(PARTITIONS, first_cas=1000), ModelEngine()
    engine.refused = {b'"value":1}', b'"value":3}'}
    live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, story)
    assert engine.versions() == versions(source)
    for id_, found in engine.live(OPTIONS.index).items():
        value = source.live()[key_of(id_)][2]
        assert found[OURS].get("error") == ("it is not taken" if value in (b"1", b"3") else None)
        assert ("value" in found) == (value not in (b"1", b"3"))


def saved(guard: int) -> list[Save]:
    return [Save(Partition(0), HeldState(guard=guard))]


def test_a_second_writer_is_refused_and_a_repeated_request_of_the_same_is_not() -> None:
    engine = ModelEngine()
    target = IndexTarget(engine, OPTIONS)
    target.load()
    first, second = target.open(0), target.open(0)
    (held,) = first.save(saved(0))
    assert held.guard == 1
    assert first.save(saved(0)) == [held], "its request was received, and the answer was lost"
    with pytest.raises(AnotherWriter):
        second.save(saved(0))


def test_documents_of_others_are_not_written_over() -> None:
    engine, source = ModelEngine(), ReplicaBucket(PARTITIONS, first_cas=1000)
    engine.prepare(OPTIONS.index, {})
    engine.documents[OPTIONS.index]["a"] = (99, b'{"theirs":1}')
    with pytest.raises(ForeignDocuments, match="--index"):
        live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, [([SET], [], [], None)])


def test_documents_without_their_positions_are_not_taken_for_current() -> None:
    engine, source = ModelEngine(), ReplicaBucket(PARTITIONS, first_cas=1000)
    live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, [([SET], [], [], None)])
    engine.drop(OPTIONS.positions)
    with pytest.raises(ForeignDocuments, match="positions were removed"):
        IndexTarget(engine, OPTIONS).load()


def test_an_index_that_refuses_everything_is_unavailable() -> None:
    engine, source = ModelEngine(), ReplicaBucket(PARTITIONS, first_cas=1000)
    engine.refused = {b'"_upper"'}
    with pytest.raises(TargetUnavailable, match="it is not taken"):
        live_through(lambda: IndexTarget(engine, OPTIONS), engine.step, source, [([SET], [], [], None)])


@given(st.binary(min_size=1, max_size=20))
@example(b"base64:YQ==")
@example(b"base64:")
def test_an_id_stands_for_one_key(key: bytes) -> None:
    assert key_of(id_of(key)) == key
    text = id_of(key)
    assert id_of(text.encode()) == text if not text.startswith("base64:") else True


def test_versions_grow_with_the_seqno_and_more_with_the_epoch() -> None:
    assert version(0, 1) < version(0, 2) < version(0, 2**48 - 1) < version(1, 0) < version(2**15 - 1, 0)
    assert version(2**15 - 1, 2**48 - 1) < 2**63
    with pytest.raises(BadCheckpoint, match="does not fit"):
        version(0, 2**48)


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (b'{"a": 1,\r\n "b": [1.50]}', {"a": 1, "b": [1.5]}),
        (b" {} ", {}),
        (b"[1, 2]", {"value": [1, 2]}),
        (b"NaN", {"text": "NaN"}),
        (b"\xff", {"base64": "/w=="}),
        (b'"\\ud800"', {"value": "\ud800"}),
    ],
)
def test_a_value_becomes_one_line_of_json(value: bytes, fields: dict[str, Any]) -> None:
    line = document(value, {"name": "n"})
    assert b"\n" not in line
    assert json.loads(line) == {OURS: {"name": "n"}, **fields}


def test_a_value_with_a_field_of_our_name_is_not_replaced_silently() -> None:
    with pytest.raises(ValueError, match="reserved"):
        document(b'{"_upper": 1}', {})
