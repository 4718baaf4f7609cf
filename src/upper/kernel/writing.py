"""The interface of the compiled kernel's writer."""

from __future__ import annotations

from typing import Protocol

from upper.kernel.plain_log import Log


class Writer(Protocol):
    """Writes one batch at a time, in a thread that never needs the interpreter.

    A second one may wait behind it. If a batch fails, that one fails with the same error, and is not written.
    """

    def begin(
        self,
        fd: int,
        head: bytes,
        records: Log,
        zeros: int = 0,
        *,
        at: int = 0,
        next: int = -1,  # noqa: A002  the file of the next segment
        start: int = 0,
        ahead: int = 0,
    ) -> int:
        """Write a frame to a file, and sync it. Returns how many bytes that will be.

        The frame is `head`, 32 bytes in which the length of the payload (u64 at 16), the CRC of
        everything behind it (u32 at 4) and the count of its sectors of zeros (u16 at 8) are filled in, and
        then the records. `at` is its offset in the file, where sectors begin at multiples of 512.

        The log takes no records from here on. Behind the frame go `zeros` bytes of zero, if there is room
        for them; the position of `fd` is before them. Once the batch is on disk, `ahead` bytes of zero are
        written to the file `next` at `start`; only `rest` waits for those.
        """
        ...

    def fileno(self) -> int:
        """Readable when the first batch is on disk or has failed, until `finish`."""
        ...

    def finish(self) -> float:
        """Wait for the first batch. The seconds that writing and syncing it took.

        An OSError has the reason why it is not on disk.
        """
        ...

    def rest(self) -> None:
        """Wait until all batches, and the zeros that follow them, are written."""
        ...

    def close(self) -> None:
        """End the thread after the batches that it has."""
        ...
