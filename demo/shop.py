"""A small shop that generates changes from a seed: users, carts and orders, as JSON.

This module only generates changes; it uses no node and no lake. The same seed gives the same changes in the
same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

CITIES = ("Amsterdam", "Bogota", "Cairo", "Dakar", "Edinburgh", "Fukuoka", "Gdansk", "Hanoi")
FIRST = ("Ada", "Barbara", "Charles", "Donald", "Edsger", "Frances", "Grace", "Hedy", "Ida", "John")
LAST = ("Allen", "Byron", "Dijkstra", "Hopper", "Knuth", "Lamarr", "Liskov", "Rhodes", "Shannon", "Turing")
GOODS = {
    "teapot": 2450,
    "kettle": 3990,
    "oolong": 1275,
    "sencha": 980,
    "assam": 860,
    "strainer": 640,
    "cup": 720,
    "scale": 1899,
}  # prices in cents
NEXT_STATUS = {"placed": "paid", "paid": "packed", "packed": "shipped", "shipped": "delivered"}


@dataclass(frozen=True, slots=True)
class Write:
    """One write to the bucket. `value` None is a delete."""

    key: str
    value: bytes | None
    expiry: int = 0  # seconds; 0: no expiry

    @property
    def changes(self) -> int:
        """The number of changes: an item that expires changes once more."""
        return 2 if self.expiry else 1


@dataclass(slots=True)
class Cart:
    """A user's cart. Its number is unique, so that a cart that expires is never filled again."""

    key: str
    items: dict[str, int]


class Shop:
    """The state from which the next change is generated."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._users: list[str] = []
        self._carts: dict[str, Cart] = {}  # by user
        self._opened = 0
        self._orders: dict[str, dict[str, object]] = {}
        self._open: list[str] = []
        self._made = 0

    def opening(self, *, users: int, orders: int) -> Iterator[Write]:
        """The initial data."""
        for _ in range(users):
            yield self._sign_up()
        yield from self.rush(orders)

    def trading(self, changes: int) -> Iterator[Write]:
        """Further changes: mostly to carts and orders, and a few deletions."""
        for _ in range(changes):
            dice = self._random.random()
            if dice < 0.35:
                yield self._fill_cart()
            elif dice < 0.55:
                yield self._place_order(self._random.choice(self._users))
            elif dice < 0.90 and self._open:
                yield self._move_order()
            elif dice < 0.97 and self._open:
                yield self._cancel_order()
            elif dice < 0.985 and self._carts:
                yield self._abandon_cart()
            else:
                yield self._sign_up()

    def rush(self, orders: int) -> Iterator[Write]:
        """New orders only."""
        for _ in range(orders):
            yield self._place_order(self._random.choice(self._users))

    def turn(self, seed: int) -> None:
        """Generate different changes from here on."""
        self._random = Random(seed)

    def _sign_up(self) -> Write:
        number = len(self._users) + 1
        first, last = self._random.choice(FIRST), self._random.choice(LAST)
        key = f"user:{number:05}"
        self._users.append(key)
        return _write(
            key,
            {
                "name": f"{first} {last}",
                "email": f"{first}.{last}.{number}@example.com".lower(),
                "city": self._random.choice(CITIES),
                "tier": self._random.choice(("basic", "basic", "basic", "gold")),
            },
        )

    def _fill_cart(self) -> Write:
        user = self._random.choice(self._users)
        if user not in self._carts:
            self._opened += 1
            self._carts[user] = Cart(f"cart:{self._opened:05}", {})
        cart = self._carts[user]
        good = self._random.choice(tuple(GOODS))
        cart.items[good] = cart.items.get(good, 0) + self._random.randint(1, 3)
        return _write(cart.key, {"user": user, "items": cart.items})

    def _abandon_cart(self) -> Write:
        """A last write to a cart, which then expires."""
        user = self._random.choice(tuple(self._carts))
        cart = self._carts.pop(user)
        return _write(cart.key, {"user": user, "items": cart.items, "abandoned": True}, expiry=1)

    def _place_order(self, user: str) -> Write:
        self._made += 1
        key = f"order:{self._made:06}"
        cart = self._carts.get(user)
        lines = cart.items if cart else {self._random.choice(tuple(GOODS)): self._random.randint(1, 4)}
        order: dict[str, object] = {
            "user": user,
            "lines": dict(lines),
            "total_cents": sum(GOODS[good] * count for good, count in lines.items()),
            "status": "placed",
        }
        self._orders[key] = order
        self._open.append(key)
        return _write(key, order)

    def _move_order(self) -> Write:
        key = self._random.choice(self._open)
        order = self._orders[key]
        order["status"] = NEXT_STATUS[str(order["status"])]
        if order["status"] == "delivered":
            self._open.remove(key)
        return _write(key, order)

    def _cancel_order(self) -> Write:
        key = self._random.choice(self._open)
        self._open.remove(key)
        del self._orders[key]
        return Write(key, None)


def _write(key: str, document: dict[str, object], *, expiry: int = 0) -> Write:
    return Write(key, json.dumps(document, separators=(",", ":")).encode(), expiry)
