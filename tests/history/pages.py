"""Parts of the documentation that code writes, and tests keep true.

A part stands between `<!-- generated: name -->` and `<!-- end of name -->`. With UPPER_WRITE_DOCS=1 in the
environment the tests write it again instead of comparing.
"""

from __future__ import annotations

import os
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def hold(page: str, name: str, text: str) -> None:
    """The part `name` of `page` is this text."""
    path = DOCS / page
    before, opening, rest = path.read_text().partition(f"<!-- generated: {name} -->\n")
    assert opening, f"docs/{page} has no part {name}"
    present, closing, after = rest.partition(f"<!-- end of {name} -->")
    assert closing, f"docs/{page}: the part {name} has no end"
    if os.environ.get("UPPER_WRITE_DOCS"):
        path.write_text(f"{before}{opening}{text}\n{closing}{after}")
    else:
        assert present == f"{text}\n", (
            f"docs/{page}: {name} is out of date; run the tests with UPPER_WRITE_DOCS=1"
        )
