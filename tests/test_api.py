"""The public surface is a list, and this is a second copy of it: a change of either is a decision."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import upper

# fmt: off
PUBLIC = [
    "__version__", "UpperError",
    "Partition", "BranchId", "Seqno", "Snapshot", "Position", "Version", "FailoverLog", "partition_of",
    "connect", "aio", "Bucket", "Item", "Metadata", "Stored", "WriteCopies", "Promoted", "Copy",
    "Feed", "Event", "Change",
    "Mutation", "Deletion", "Expiration", "Flush", "Rollback", "SnapshotEnd", "StateChange",
    "Positions", "Checkpoint",
]
# fmt: on


def test_the_public_names_are_these() -> None:
    assert upper.__all__ == PUBLIC
    assert dir(upper) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    value = getattr(upper, name)
    assert value is getattr(upper, name)
    assert isinstance(value, str) or value.__doc__


def test_type_checkers_and_the_interpreter_find_the_same_things() -> None:
    """The imports under TYPE_CHECKING and the table of modules must list the same names."""
    tree = ast.parse(Path(upper.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == upper._MODULES
    assert set(typed) == set(upper.__all__)


def test_importing_upper_imports_no_subpackage() -> None:
    program = "import sys, upper; print([m for m in sys.modules if m.startswith('upper.')])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_name_that_is_not_public_is_refused_with_a_sentence() -> None:
    with pytest.raises(AttributeError, match="'nonsense'; its names are in"):
        getattr(upper, "nonsense")  # noqa: B009
