"""Code outside `wire` asks a dialect for a capability, and never which dialect it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
from upper.wire.session import DIALECTS

SOURCE = Path(upper.__file__).parent
TABLES = {name.upper() for name in DIALECTS}
NAMES = set(DIALECTS)


def findings(text: str) -> Iterator[str]:
    """Every place of a module that distinguishes dialects by name or identity."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(left=left, comparators=others) if _distinguishes((left, *others)):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Match(subject=subject, cases=cases):
                patterns = [
                    part.value
                    for case in cases
                    for part in ast.walk(case)
                    if isinstance(part, ast.MatchValue)
                ]
                if _of_a_dialect(subject) or any(map(_identifies, patterns)):
                    yield f"{node.lineno}: match {ast.unparse(subject)}"
            case ast.Dict(keys=keys) if sum(1 for key in keys if key is not None and _identifies(key)) > 1:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Name("isinstance"), args=[_, kind]) if _identifies(kind):
                yield f"{node.lineno}: {ast.unparse(node)}"


def _distinguishes(operands: tuple[ast.expr, ...]) -> bool:
    """Whether a comparison has a certain dialect, or two of them; whether there is one may be asked."""
    absent = any(isinstance(each, ast.Constant) and each.value is None for each in operands)
    return any(map(_identifies, operands)) or (any(map(_of_a_dialect, operands)) and not absent)


def _identifies(node: ast.expr) -> bool:
    match node:
        case ast.Name(name):
            return name in TABLES
        case ast.Attribute(value, "name"):
            return _of_a_dialect(value)
        case ast.Attribute(_, name):
            return name in TABLES
        case ast.Constant(str() as text):
            return text in NAMES
        case ast.Tuple(parts) | ast.Set(parts) | ast.List(parts):
            return any(map(_identifies, parts))
    return False


def _of_a_dialect(node: ast.expr) -> bool:
    match node:
        case ast.Name(name) | ast.Attribute(_, name):
            return "dialect" in name
    return False


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "wire")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_outside_wire_compares_a_dialect_by_name_or_identity(path: Path) -> None:
    assert list(findings(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = dialect is UPR",
        "x = self.dialect is not wire.UPR0",
        "x = dialect.name == 'upr'",
        "x = follower.dialect.name != other",
        "x = address.scheme == 'tap'",
        "x = 'dcp' == scheme",
        "x = chosen_dialect in (UPR, TAP)",
        "x = stream.dialect is self.dialect",
        "x = dialect == family(head)",
        "x = {'upr': 1, 'upr0': 2}[scheme]",
        "match self.dialect:\n    case x:\n        pass",
        "match scheme:\n    case 'tap':\n        pass",
    ],
)
def test_a_comparison_is_found_however_it_is_written(text: str) -> None:
    assert len(list(findings(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "x = dialect.flow_control",
        "x = self.dialect is not None",
        "x = (self.dialect or UPR).encode(message)",
        "x = DIALECTS[name].positions",
        "log.info('%s', dialect.name)",
        "x = 'upper' == name",
    ],
)
def test_asking_for_a_capability_is_allowed(text: str) -> None:
    assert list(findings(text)) == []
