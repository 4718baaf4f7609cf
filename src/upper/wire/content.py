"""What the key or the value of a packet may hold: nothing, bytes, one layout, or a layout repeated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from upper.errors import ReservedBits
from upper.wire.packet import Layout


class Content(ABC):
    """A key or a value: which lengths are valid, and which attributes it holds."""

    names: tuple[str, ...] = ()
    wanted: str  # ends a sentence that begins with "it"

    @property
    def presence(self) -> bool | None:
        """True if it is required, False if it is not allowed, None if it is optional."""
        return True if not self.fits(0) else False if self is NOTHING else None

    @abstractmethod
    def fits(self, length: int) -> bool: ...

    @abstractmethod
    def read(self, data: bytes, *, at: int) -> dict[str, Any]: ...

    @abstractmethod
    def write(self, attributes: Callable[[str], Any]) -> bytes: ...


class Plain(Content):
    """Bytes of any kind, under one name."""

    def __init__(self, name: str, *, required: bool) -> None:
        self.names, self.required = (name,), required
        self.wanted = "is required" if required else "is optional"

    def fits(self, length: int) -> bool:
        return length > 0 or not self.required

    def read(self, data: bytes, *, at: int) -> dict[str, Any]:
        return {self.names[0]: data}

    def write(self, attributes: Callable[[str], Any]) -> bytes:
        return bytes(attributes(self.names[0]))


class Nothing(Content):
    """A part that is not allowed."""

    wanted = "is not allowed"

    def fits(self, length: int) -> bool:
        return length == 0

    def read(self, data: bytes, *, at: int) -> dict[str, Any]:
        return {}

    def write(self, attributes: Callable[[str], Any]) -> bytes:
        return b""


class Fixed(Content):
    """One layout of a fixed size."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.names = layout, layout.names
        self.wanted = f"must have {layout.size} bytes"

    def fits(self, length: int) -> bool:
        return length == self.layout.size

    def read(self, data: bytes, *, at: int) -> dict[str, Any]:
        return self.layout.unpack(data, base=at)

    def write(self, attributes: Callable[[str], Any]) -> bytes:
        return self.layout.pack({name: attributes(name) for name in self.layout.attributes})


class Many(Content):
    """A layout repeated to the end of the value."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        make: Callable[..., Any],
        parts: Callable[[Any], tuple[int, ...]],
        *,
        required: bool = False,
    ) -> None:
        self.names, self.layout, self._make, self._parts = (name,), layout, make, parts
        self.required = required
        self.wanted = f"must have {layout.size} bytes for each of its {name}"

    def fits(self, length: int) -> bool:
        return length % self.layout.size == 0 and (length > 0 or not self.required)

    def read(self, data: bytes, *, at: int) -> dict[str, Any]:
        found = []
        for start in range(0, len(data), self.layout.size):
            try:
                found.append(self._make(*self.layout.numbers(data, start).values()))
            except ValueError as error:
                raise ReservedBits(str(error), at=at + start) from error
        return {self.names[0]: tuple(found)}

    def write(self, attributes: Callable[[str], Any]) -> bytes:
        return b"".join(
            self.layout.pack(dict(zip(self.layout.names, self._parts(one), strict=True)))
            for one in attributes(self.names[0])
        )


def must(name: str) -> Plain:
    return Plain(name, required=True)


def may(name: str) -> Plain:
    return Plain(name, required=False)


NOTHING = Nothing()
