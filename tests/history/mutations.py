"""Every comparison of the resume decision, broken in every way, and the tests that detect it.

A mutant is the real source with one comparison operator exchanged for another. It is tried against the
examples (`cases`) and against the small model (`exhaustive`). A mutant that answers exactly as the original
for every request there can be is listed in `SAME`, with the reason.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tests.history.cases import CASES, LOG, PROMOTIONS
from tests.history.exhaustive import Copy, Divergence, Model, failover_log
from upper.history import resume
from upper.model.values import FailoverLog, Position, Seqno

SYMBOLS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)

# Mutants that make no difference, and why.
SAME = {
    "decide: asked.seqno <= ZERO": "no seqno is below 0",
    "decide: asked.branch > NO_BRANCH": "no branch is below 0",
    "decide: snapshot.start >= shared": "both answers then name the same seqno",
    "narrowed: self.seqno >= self.snapshot.end": "no position lies after its snapshot",
    "narrowed: self.seqno <= self.snapshot.start": "no position lies before its snapshot",
}


@dataclass(frozen=True)
class Subject:
    """A function that the decision rests on, and where it is looked up."""

    name: str
    owner: Any

    def original(self) -> FunctionType:
        found: object = inspect.getattr_static(self.owner, self.name)
        assert type(found) is FunctionType
        return found


SUBJECTS = (
    Subject("decide", resume),
    Subject("answer", resume),
    Subject("shared_until", FailoverLog),
    Subject("promoted", FailoverLog),
    Subject("narrowed", Position),
)


@dataclass(frozen=True)
class Mutant:
    subject: Subject
    was: str
    name: str  # "function: the comparison as it reads now"
    function: FunctionType

    @contextmanager
    def in_place(self) -> Iterator[None]:
        original = self.subject.original()
        failover_log.cache_clear()
        setattr(self.subject.owner, self.subject.name, self.function)
        try:
            yield
        finally:
            setattr(self.subject.owner, self.subject.name, original)
            failover_log.cache_clear()


def mutants() -> Iterator[Mutant]:
    """One for each way to break each comparison."""
    for subject in SUBJECTS:
        source = textwrap.dedent(inspect.getsource(subject.original()))
        count = sum(isinstance(node, ast.Compare) for node in ast.walk(ast.parse(source)))
        for index in range(count):
            pristine = _comparison(ast.parse(source), index)
            was = type(pristine.ops[0])
            others = ORDERED if was in ORDERED else (ast.Is, ast.IsNot)
            for operator in others:
                if operator is was:
                    continue
                tree = ast.parse(source)
                broken = _comparison(tree, index)
                broken.ops[0] = operator()
                yield Mutant(
                    subject,
                    ast.unparse(pristine),
                    f"{subject.name}: {ast.unparse(broken)}",
                    _build(tree, subject),
                )


def _comparison(tree: ast.Module, index: int) -> ast.Compare:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return found[index]


def _build(tree: ast.Module, subject: Subject) -> FunctionType:
    space = dict(subject.original().__globals__)
    exec(compile(tree, f"<mutant of {subject.name}>", "exec", dont_inherit=True), space)
    made = space[subject.name]
    assert isinstance(made, FunctionType)
    # It looks other names up where the original does, so that mutants of those reach it.
    mutant = FunctionType(made.__code__, subject.original().__globals__, subject.name, made.__defaults__)
    mutant.__kwdefaults__ = made.__kwdefaults__
    return mutant


def caught_by_examples(mutant: Mutant) -> str | None:
    """The first example that the mutant answers otherwise."""
    with mutant.in_place():
        for case in CASES:
            try:
                given = resume.answer(
                    case.request(),
                    LOG,
                    high=Seqno(case.high),
                    purged=Seqno(case.purged),
                    known_at_zero=case.known_at_zero,
                )
            except (TypeError, ValueError):
                return case.name
            if not case.holds(given):
                return case.name
        for promotion in PROMOTIONS:
            if not promotion.holds():
                return promotion.name
    return None


def caught_by_the_small_world(mutant: Mutant, *, depth: int) -> str | None:
    """The shortest history in which a copy that obeys the mutant goes wrong."""
    with mutant.in_place():
        try:
            Model(lambda *args, **kwargs: resume.decide(*args, **kwargs)).explore(depth)
        except Divergence as problem:
            return str(problem).partition(":")[0]
        except (TypeError, ValueError):
            return "any: it breaks down"
    return None


# ── Copies that do not keep the rules around the decision ─────────────────────────────────────────


class ClaimsNoSnapshot(Model):
    """Inside a snapshot, claims to be consistent."""

    def claim(self, copy: Copy) -> tuple[int, int, int]:
        return copy.seqno, copy.seqno, copy.seqno


class TrustsTheUpstream(Model):
    """Filled from 0, assumes that no deletion is missing."""

    def purged_upstream(self, end: int) -> int:
        return 0


class BranchesWhereItStands(Model):
    """Promoted inside a snapshot, begins its branch at the last change instead of the last whole snapshot."""

    def promoted_at(self, copy: Copy) -> int:
        return copy.seqno


class KeepsTheOldLog(Model):
    """Continues under its former branch, and ignores the producer's failover log."""

    def stream(self, copy: Copy, active: Copy, records: int | None) -> Copy:
        after = super().stream(copy, active, records)
        return after._replace(log=copy.log) if copy.log else after


class StaysWhenItIsInside(Model):
    """Answered with a rollback, keeps the unfinished snapshot and claims to have rolled back."""

    def gone_back(self, copy: Copy, to: int) -> Copy:
        back = super().gone_back(copy, to)
        return back._replace(items=copy.items) if copy.start < copy.seqno < copy.end else back


class PromotesWithoutABranch(Model):
    """Makes a copy active as if it were known to have everything."""

    def promoted(self, copy: Copy, branch: int) -> Copy:
        after = super().promoted(copy, branch)
        return after._replace(log=copy.log) if copy.log else after


RULE_BREAKERS: tuple[type[Model], ...] = (
    ClaimsNoSnapshot,
    TrustsTheUpstream,
    BranchesWhereItStands,
    KeepsTheOldLog,
    StaysWhenItIsInside,
    PromotesWithoutABranch,
)


def goes_wrong(breaker: type[Model], *, depth: int) -> str | None:
    """The shortest history in which that costs data."""
    try:
        breaker().explore(depth)
    except Divergence as problem:
        return str(problem).partition(":")[0]
    return None
