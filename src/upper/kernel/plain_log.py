"""The records of a batch, in plain Python: what the journal writes as one frame, and what streams are sent.

Records are appended until the batch is handed to the writer. The compiled log holds them in one piece of
memory, so that the loops over a batch need no object for each record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from upper.kernel.packets import check_packet
from upper.record.layout import AT_OPCODE, AT_PARTITION, FLUSH, MUTATION


class Log:
    """Whole packets, in order: changes, flushes, and the facts between them."""

    __slots__ = ("_records", "size")

    def __init__(self, records: Iterable[bytes] = ()) -> None:
        self._records: list[bytes] = []
        self.size = 0  # bytes of all records
        for record in records:
            self.append(record)

    def append(self, record: bytes) -> None:
        check_packet(record)
        self.take(record)

    def take(self, record: bytes) -> None:
        """`append` of a packet that the kernel has made."""
        self._records.append(record)
        self.size += len(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and self._records == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Log({self._records})"

    def changes(self) -> Log:
        """What streams carry: changes and flushes, without the facts between them."""
        return Log(record for record in self._records if MUTATION <= record[AT_OPCODE] <= FLUSH)

    def without(self, partition: int) -> Log:
        """The records of all other partitions."""
        return Log(record for record in self._records if _partition(record) != partition)

    def partitions(self) -> set[int]:
        """The partitions that have a record here."""
        return set(map(_partition, self._records))

    def payload(self) -> bytes:
        """The records as one piece: the payload of a frame."""
        return b"".join(self._records)


def _partition(record: bytes) -> int:
    return record[AT_PARTITION] << 8 | record[AT_PARTITION + 1]
