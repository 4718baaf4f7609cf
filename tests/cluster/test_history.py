"""The checker of histories finds what is not linearizable: compared with every order of a small history."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.running import KeyHistory

Write = tuple[float, float | None]  # sent, acknowledged; None: its outcome is unknown
Read = tuple[float, float, int]


def history(writes: list[Write], reads: list[Read]) -> KeyHistory:
    found = KeyHistory(reads=list(reads))
    for number, (sent, acknowledged) in enumerate(writes, start=1):
        found.sent.append((sent, number))
        if acknowledged is not None:
            found.acknowledged.append((acknowledged, number))
    return found


def linearizable(writes: list[Write], reads: list[Read]) -> bool:
    """By trial: some order of the operations respects their times, and each read returns the last write."""
    operations = [(sent, end, number, "w") for number, (sent, end) in enumerate(writes, start=1)]
    operations += [(begun, ended, number, "r") for begun, ended, number in reads]
    optional = [operation for operation in operations if operation[1] is None]
    for left_out in range(2 ** len(optional)):
        gone = [operation for place, operation in enumerate(optional) if left_out >> place & 1]
        kept = [operation for operation in operations if operation not in gone]
        if any(_fits(order) for order in permutations(kept)):
            return True
    return False


def _fits(order: tuple[tuple[float, float | None, int, str], ...]) -> bool:
    value, latest = 0, 0.0
    for begun, ended, number, kind in order:
        if ended is not None and ended < latest:
            return False  # it was over before one that comes before it had begun
        latest = max(latest, begun)
        if kind == "r" and number != value:
            return False
        value = number if kind == "w" else value
    return True


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Write], list[Read]]:
    """One writer, one write after the other; reads at any time that return anything."""
    times = iter(sorted(draw(st.lists(st.integers(1, 30), min_size=4, max_size=4, unique=True))))
    writes: list[Write] = []
    for _ in range(2):
        sent, ended = float(next(times)), float(next(times))
        writes.append((sent, draw(st.sampled_from((ended, ended, None)))))
    pairs = st.lists(st.integers(0, 31), min_size=2, max_size=2, unique=True).map(sorted)
    reads = draw(st.lists(st.tuples(pairs, st.integers(0, 2)), max_size=3))
    return writes, [(begun + 0.5, ended + 0.5, number) for (begun, ended), number in reads]


@given(histories())
def test_the_checker_accepts_exactly_the_histories_that_are_linearizable(
    found: tuple[list[Write], list[Read]],
) -> None:
    writes, reads = found
    assert (not list(history(writes, reads).problems("key"))) == linearizable(writes, reads)


def test_a_stale_read_an_invented_value_and_a_read_back_in_time_are_found() -> None:
    writes: list[Write] = [(1.0, 2.0), (3.0, 9.0)]
    for read, what in (
        ([(2.5, 2.6, 0)], "not 1..1"),
        ([(2.5, 2.6, 2)], "not 1..1"),
        ([(4.0, 5.0, 2), (4.1, 8.0, 2), (6.0, 7.0, 1)], "returned 1 after another returned 2"),
    ):
        assert what in "".join(history(writes, read).problems("key"))
    assert not list(history(writes, [(4.0, 6.0, 2), (5.0, 7.0, 1)]).problems("key")), "they overlap"
