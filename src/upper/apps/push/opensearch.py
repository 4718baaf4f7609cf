"""An index of OpenSearch or Elasticsearch as a target: one document for each key, and positions beside it.

A document has the fields of a JSON object, or `value`, `text` or `base64` for any other value, and `_upper`,
which names its source. Its version is external: `(epoch << 48) | seqno`. A repair after a rollback
raises the epoch, so what it writes replaces lost versions with higher seqnos, and a request that arrives late
replaces nothing newer. Positions are in the index `INDEX.upper`, with the identity of the index that they
describe: an index that was created again, or restored from a snapshot, is compared with the source.

A document that the index rejects is reported. The index then has one without its fields, with the
reason in `_upper.error`, so that no older version stays.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4
from zlib import crc32

from upper.apps.push.content import content, packed
from upper.apps.push.search_engine import (
    ABSENT,
    BAD,
    BROKEN,
    CONFLICT,
    TOO_LARGE,
    DocumentWrite,
    SearchEngine,
    StoredDocument,
    WriteOutcome,
)
from upper.apps.push.state import MOST_EPOCHS, TargetState
from upper.apps.push.tasks import (
    SIGNS,
    AnotherWriter,
    HeldState,
    Portion,
    RejectedChange,
    Save,
    TargetUnavailable,
    newest_of,
)
from upper.errors import BadCheckpoint, InvalidArguments
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.changes import MUTATION

SEQNO_BITS = 48
OURS = "_upper"  # the field of a document that is not of its value
KEY = f"{OURS}.key"
ENCODED = "base64:"
# The documents of a restored index may be newer than its positions, by fewer repairs than this.
RESTORED_EPOCHS = 64
KEPT_DELETIONS = "10m"  # how long the index refuses an old version of a deleted document
DOCUMENTS = {
    "settings": {"index.gc_deletes": KEPT_DELETIONS},
    "mappings": {
        "properties": {
            OURS: {
                "dynamic": False,
                "properties": {
                    "name": {"type": "keyword"},
                    "key": {"type": "keyword"},
                    "partition": {"type": "integer"},
                    "seqno": {"type": "long"},
                    "error": {"type": "keyword"},
                },
            }
        }
    },
}
POSITIONS = {
    "settings": {"index.number_of_shards": 1, "index.gc_deletes": KEPT_DELETIONS},
    "mappings": {"dynamic": False, "properties": {}},
}


class ForeignDocuments(InvalidArguments):
    def __init__(self, index: str) -> None:
        super().__init__(
            f"the index {index} has documents that this push did not write, or whose positions were removed "
            f"from {index}.upper; choose another --index, or delete both indexes to begin again"
        )


@dataclass(frozen=True)
class IndexOptions:
    """`name`: of this push, in documents and positions. `partitions`: of the source."""

    index: str
    name: str
    partitions: int

    @property
    def positions(self) -> str:
        return f"{self.index}.upper"

    def document(self, partition: Partition, slot: int | None = None) -> str:
        return f"{self.name}/{partition}/{'state' if slot is None else f'keys/{slot}'}"


class IndexTarget:
    """An index. Each partition is written by one worker at a time; its state refuses a second one."""

    width = 8

    def __init__(self, engine: SearchEngine, options: IndexOptions) -> None:
        self._engine, self._options, self.name = engine, options, options.name

    def close(self) -> None:
        self._engine.close()

    def history(self) -> Mapping[Partition, int]:
        return {Partition(0): crc32(self._engine.identity(self._options.index).encode())}

    def load(self) -> dict[Partition, HeldState]:
        engine, options = self._engine, self._options
        engine.prepare(options.index, DOCUMENTS)
        engine.prepare(options.positions, POSITIONS)
        identity = engine.identity(options.index)
        ids = {options.document(Partition(number)): Partition(number) for number in range(options.partitions)}
        held = {}
        for id_, found in engine.get(options.positions, list(ids)).items():
            state = _state_of(found)
            if found.source.get("index") != identity:
                state = _restored(state)
            held[ids[id_]] = HeldState(state, found.version, state.stood.position.seqno)
        if not held and any(True for _ in engine.find(options.index, {f"{OURS}.name": self.name}, by=KEY)):
            raise ForeignDocuments(options.index)
        return held

    def open(self, task: int) -> IndexSession:
        return IndexSession(self._engine.another(), self._options)


class IndexSession:
    """The connection of one worker."""

    def __init__(self, engine: SearchEngine, options: IndexOptions) -> None:
        self._engine, self._options, self.name = engine, options, options.name
        self._identity = engine.identity(options.index)
        self._writer = uuid4().hex
        self.rejections: list[RejectedChange] = []

    def close(self) -> None:
        self._engine.close()

    # ── States ────────────────────────────────────────────────────────────────────────────────────

    def slots(self, partition: Partition, state: TargetState) -> Sequence[bytes | None]:
        ids = [self._options.document(partition, slot.number) for slot in state.slots]
        found = self._engine.get(self._options.positions, ids)
        return [b64decode(found[id_].source["keys"]) if id_ in found else None for id_ in ids]

    def save(self, saves: Sequence[Save]) -> list[HeldState]:
        index = self._options.positions
        slots = [
            DocumentWrite(
                self._options.document(each.partition, each.held.state.slots[-1].number),
                source=packed({"keys": b64encode(each.slot).decode()}),
            )
            for each in saves
            if each.slot is not None
        ]
        for outcome in self._engine.bulk(index, slots) if slots else ():
            if not outcome.done:
                raise _refused(index, outcome)
        states = [
            DocumentWrite(
                self._options.document(each.partition),
                each.held.guard + 1,
                packed(
                    {
                        "state": b64encode(each.held.state.encode()).decode(),
                        "index": self._identity,
                        "writer": self._writer,
                    }
                ),
            )
            for each in saves
        ]
        outcomes = self._engine.bulk(index, states) if states else []
        conflicts = []
        for operation, outcome in zip(states, outcomes, strict=True):
            if outcome.status == CONFLICT:
                conflicts.append(operation)
            elif not outcome.done:
                raise _refused(index, outcome)
        self._check_ours(conflicts)
        return [replace(each.held, guard=each.held.guard + 1) for each in saves]

    commit = save

    def _check_ours(self, conflicts: Sequence[DocumentWrite]) -> None:
        """A state that exists already is ours if its first request was received and not answered."""
        if not conflicts:
            return
        found = self._engine.get(self._options.positions, [each.id for each in conflicts])
        for each in conflicts:
            theirs = found.get(each.id)
            if theirs is None or theirs.version != each.version or theirs.source["writer"] != self._writer:
                raise AnotherWriter(self.name)

    # ── Documents ─────────────────────────────────────────────────────────────────────────────────

    def prepare(self, portions: Sequence[Portion]) -> list[Portion]:
        return [replace(each, rows=newest_of(each.rows)) for each in portions]

    def write(self, portions: Sequence[Portion]) -> set[Partition]:
        rows: list[dict[str, Any]] = []
        operations, epochs = [], []
        for portion in portions:
            for row in portion.rows.to_pylist():
                rows.append(row)
                operations.append(self._operation(row, portion.epoch))
                epochs.append(portion.epoch)
        # A value that cannot be a document has no request of its own: what replaces it is sent below.
        sent = [each for each in operations if isinstance(each, DocumentWrite)]
        outcomes = iter(self._engine.bulk(self._options.index, sent) if sent else ())
        bad: list[tuple[dict[str, Any], int, str]] = []
        conflicts: dict[str, int] = {}
        for row, operation, epoch in zip(rows, operations, epochs, strict=True):
            if not isinstance(operation, DocumentWrite):
                bad.append((row, epoch, operation))
                continue
            outcome = next(outcomes)
            if outcome.status == CONFLICT:
                conflicts[operation.id] = epoch
            elif operation.source is not None and outcome.status in (BAD, TOO_LARGE, BROKEN):
                bad.append((row, epoch, outcome.error))
            elif not outcome.done and not (operation.source is None and outcome.status == ABSENT):
                raise _refused(self._options.index, outcome)
        self._check_newer(conflicts)
        self._reject(bad)
        return set()

    def _operation(self, row: Mapping[str, Any], epoch: int) -> DocumentWrite | str:
        """The change as an operation, or why its value is no document."""
        id_, number = id_of(row["key"]), version(epoch, row["seqno"])
        if row["operation"] != MUTATION:
            return DocumentWrite(id_, number)
        try:
            return DocumentWrite(id_, number, document(row["value"] or b"", self._about(row)))
        except ValueError as error:
            return str(error)

    def _about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Where a document came from."""
        return {
            "name": self.name,
            "key": id_of(row["key"]),
            "partition": row["partition"],
            "branch": str(row["branch"] & SIGNS),
            "seqno": row["seqno"],
            "cas": str(row["cas"] & SIGNS),
            "revision": str(row["revision"] & SIGNS),
            "flags": (row["flags"] or 0) & 0xFFFFFFFF,
            "expiration": (row["expiration"] or 0) & 0xFFFFFFFF,
        }

    def _check_newer(self, conflicts: Mapping[str, int]) -> None:
        """The document that refused an operation must be the same or a newer version of this push."""
        if not conflicts:
            return
        for id_, found in self._engine.get(self._options.index, list(conflicts)).items():
            about = found.source.get(OURS)
            if not isinstance(about, dict) or about.get("name") != self.name:
                raise ForeignDocuments(self._options.index)
            if found.version >> SEQNO_BITS > conflicts[id_]:
                raise AnotherWriter(self.name)

    def _reject(self, bad: Sequence[tuple[dict[str, Any], int, str]]) -> None:
        """Write documents without fields in place of those that the index rejects, and report them."""
        operations = [
            DocumentWrite(
                id_of(row["key"]),
                version(epoch, row["seqno"]),
                packed({OURS: {**self._about(row), "error": error}}),
            )
            for row, epoch, error in bad
        ]
        outcomes = self._engine.bulk(self._options.index, operations) if operations else []
        for (row, _, error), outcome in zip(bad, outcomes, strict=True):
            if not outcome.done and outcome.status != CONFLICT:
                raise _refused(self._options.index, outcome)
            self.rejections.append(
                RejectedChange(id_of(row["key"]), Partition(row["partition"]), Seqno(row["seqno"]), error)
            )

    # ── Keys that the source does not have ────────────────────────────────────────────────────────

    def keys(self, partition: Partition) -> Iterator[bytes]:
        terms: dict[str, str | int] = {
            f"{OURS}.name": self.name,
            f"{OURS}.partition": int(partition),
        }
        return map(key_of, self._engine.find(self._options.index, terms, by=KEY))

    def remove(
        self, partition: Partition, keys: Mapping[bytes, set[int]], *, epoch: int, seqno: Seqno
    ) -> None:
        # The epoch is that of this repair, which has not written these keys. Whatever the source writes next
        # is newer, also a first change.
        operations = [DocumentWrite(id_of(key), version(epoch, ZERO)) for key in keys]
        for outcome in self._engine.bulk(self._options.index, operations):
            if not outcome.done and outcome.status not in (CONFLICT, ABSENT):
                raise _refused(self._options.index, outcome)


def version(epoch: int, seqno: int) -> int:
    """The version of a document: it grows with the seqno, and with every repair."""
    if seqno >> SEQNO_BITS or epoch > MOST_EPOCHS:
        raise BadCheckpoint(
            f"seqno {seqno} of epoch {epoch} does not fit the version of a document; use a new index"
        )
    return epoch << SEQNO_BITS | seqno


def id_of(key: bytes) -> str:
    """The id of a document: the key as text, or, where it is none, in base64."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ENCODED
    return ENCODED + b64encode(key).decode() if text.startswith(ENCODED) else text


def key_of(id_: str) -> bytes:
    return b64decode(id_.removeprefix(ENCODED)) if id_.startswith(ENCODED) else id_.encode()


def document(value: bytes, about: Mapping[str, Any]) -> bytes:
    """The source of a document. Raises ValueError for a value that has a field of our name."""
    field, text, parsed = content(value)
    ours = packed({OURS: about})
    if not isinstance(parsed, dict):
        return ours[:-1] + f',"{field}":{text}}}'.encode()
    if OURS in parsed:
        raise ValueError(f"the value has a field {OURS}, which is reserved")
    return ours[:-1] + b"," + text[1:].encode() if parsed else ours


def _state_of(found: StoredDocument) -> TargetState:
    try:
        data = b64decode(found.source["state"])
    except (KeyError, TypeError, ValueError):
        raise BadCheckpoint(
            "the position in the index is damaged; choose another --name to begin again"
        ) from None
    return TargetState.decode(data)


def _restored(state: TargetState) -> TargetState:
    """The state of an index that may hold anything: all keys are compared, with versions that are newer."""
    epoch = min(state.epoch + RESTORED_EPOCHS, MOST_EPOCHS)
    return replace(state, repair=ZERO, floor=Seqno(max(state.floor, 1)), epoch=epoch)


def _refused(index: str, outcome: WriteOutcome) -> TargetUnavailable:
    return TargetUnavailable(f"{index} refuses a write: {outcome.error or outcome.status}; check the cluster")


def check_index_name(index: str | None) -> str:
    """The name, or InvalidArguments: OpenSearch allows few characters in one."""
    if not index:
        raise InvalidArguments("an index is needed; name it with --index NAME")
    if index != index.lower() or index[0] in "-_+." or set(index) & set('\\/*?"<>| ,#:') or len(index) > 200:
        raise InvalidArguments(
            f"{index!r} is not the name of an index; use small letters, digits, - and _, a letter first"
        )
    return index
