"""No comparison of the resume decision can be broken without a test that notices."""

from __future__ import annotations

import pytest

from tests.history import pages
from tests.history.mutations import (
    RULE_BREAKERS,
    SAME,
    Mutant,
    caught_by_examples,
    caught_by_the_small_world,
    goes_wrong,
    mutants,
)

ALL = tuple(mutants())


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_broken_comparison_is_noticed(mutant: Mutant) -> None:
    caught = caught_by_examples(mutant)
    if mutant.name in SAME:
        assert caught is None, f"listed as making no difference, but it answers otherwise: {caught}"
    else:
        assert caught is not None


def test_mutants_without_an_effect_exist() -> None:
    assert set(SAME) <= {mutant.name for mutant in ALL}


@pytest.mark.slow
def test_the_page_lists_every_mutation_and_what_noticed_it() -> None:
    rows = [
        "| was | became | example that notices | small model: shortest history that goes wrong |",
        "|---|---|---|---|",
    ]
    for mutant in ALL:
        function, _, now = mutant.name.partition(": ")
        example = caught_by_examples(mutant)
        noticed = example or f"none can: {SAME[mutant.name]}"
        world = None if function == "answer" else caught_by_the_small_world(mutant, depth=4)
        rows.append(f"| `{function}`: `{mutant.was}` | `{now}` | {noticed} | {world or '–'} |")
    pages.hold("testing.md", "mutations", "\n".join(rows))
    breakers = ["| a copy that | goes wrong when |", "|---|---|"]
    for breaker in RULE_BREAKERS:
        assert breaker.__doc__ is not None
        what = breaker.__doc__.strip().rstrip(".")
        breakers.append(f"| {what[0].lower()}{what[1:]} | {goes_wrong(breaker, depth=6)} |")
    pages.hold("testing.md", "rules", "\n".join(breakers))
