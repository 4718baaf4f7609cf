"""deltalake's Python file system may abort the interpreter at its end: no code or page uses it.

`to_pyarrow_table()` and `to_pyarrow_dataset()` use it unless they are given an Arrow file system;
`to_pandas()` always goes through them.
"""

from __future__ import annotations

import re

from tests.docs.blocks import TOP

UNSAFE = re.compile(r"\.to_(?:pyarrow_table|pyarrow_dataset|pandas)\((?!\s*filesystem=)")


def test_delta_tables_are_read_with_an_arrow_file_system() -> None:
    found = []
    for folder in ("src", "tests", "docs", "examples", "demo", "bench", "README.md"):
        top = TOP / folder
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix not in (".py", ".md", ".ipynb") or path == TOP / "tests/docs/test_safe_delta.py":
                continue
            text = path.read_text()
            if "deltalake" in text or "DeltaTable" in text:
                found += [f"{path.relative_to(TOP)}: {hit.group()}" for hit in UNSAFE.finditer(text)]
    assert found == []


def test_unsafe_calls_are_recognised() -> None:
    assert UNSAFE.search("DeltaTable(path).to_pyarrow_table()")
    assert UNSAFE.search("table.to_pyarrow_table(columns=['key'])")
    assert UNSAFE.search("DeltaTable(path).to_pandas()")
    assert not UNSAFE.search("table.to_pyarrow_table(\n    filesystem=fs.LocalFileSystem())")
