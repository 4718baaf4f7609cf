"""How pieces of any size reach the event loop: whole and in order, large ones in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from upper.server.settings import StreamSettings
from upper.server.transport import SLICE_BYTES, WHOLE, Transport


class Recorded(asyncio.Transport):
    """What is written, call by call; the peer takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_a_chunk_of_a_backfill_is_written_at_once(loop: asyncio.AbstractEventLoop) -> None:
    """A chunk ends with a whole record, so most are a little longer than their size."""
    recorded, sent = Recorded(), bytes(StreamSettings().chunk + 1000)
    connection = Transport(loop)
    connection.attach(recorded, buffer=512 << 10)
    connection.send(sent)
    assert recorded.calls == [sent]


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES, WHOLE, WHOLE + 1, 2 * SLICE_BYTES + 1, 3 << 20])
def test_pieces_arrive_whole_in_slices_of_a_bounded_size(loop: asyncio.AbstractEventLoop, size: int) -> None:
    recorded, piece = Recorded(), bytes(range(256)) * (size // 256) + bytes(size % 256)
    connection = Transport(loop)
    connection.attach(recorded, buffer=512 << 10)
    for sent in (piece, b"behind it"):
        connection.send(sent)
    assert b"".join(recorded.calls) == piece + b"behind it"
    assert max(map(len, recorded.calls)) <= WHOLE
    assert connection.bytes_out == size + 9
