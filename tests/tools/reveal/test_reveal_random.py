"""Trees of adders are found from sums alone: random trees, on simulated engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpusim.tools.reveal import reveal_order
from tests.oracles.budget import SEED, budget
from tests.tools.reveal.random_trees import Adders, Machine, canonical, canonical_of, draw

#: Trees that are revealed by the same sums, each as one element.
BATCH = 250
MOST_RANKS = 64
ALL = ("rounded", "exact", "aligned")
EXACT = ("rounded", "exact")

ADDERS = (
    Adders("float32", 24, "nearest-even", ALL),
    Adders("bfloat16", 8, "nearest-even", ALL),
    Adders("float16", 11, "nearest-even", ALL),
    Adders("bfloat16", 24, "nearest-even", ALL),
    Adders("float32", 24, "toward-zero", EXACT),
    Adders("float16", 24, "nearest-even", ALL),
    Adders("float64", 53, "nearest-even", EXACT),
    Adders("float32", 24, "up", EXACT),
    Adders("float32", 24, "down", EXACT),
    Adders("float32", 24, "away", EXACT),
    Adders("bfloat16", 24, "toward-zero", ("rounded",)),
    Adders("float8_e5m2", 11, "nearest-even", ("rounded",)),
)


def batch(number: int) -> tuple[int, Adders, list[Any]]:
    """The ranks, the adders and the trees of one batch."""
    random = np.random.default_rng([SEED, number])
    ranks = int(random.integers(2, MOST_RANKS + 1))
    adders = ADDERS[number % len(ADDERS)]
    chain = float(random.choice([0.0, 0.3, 0.8]))
    return ranks, adders, [draw(random, ranks, adders, chain) for _ in range(BATCH)]


def reveal(ranks: int, adders: Adders, trees: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The file's contents, and each element's entry or the reason why there is none."""
    machine = Machine(trees, ranks, adders)
    engine = reveal_order.Given(machine, ranks)
    options = reveal_order.Options(repeats=1, verify=1)
    contents = reveal_order.reveal(engine, [reveal_order.Call(len(trees), adders.dtype)], options)
    (call,) = contents["calls"]
    entries: list[Any] = []
    for begin, end, number, *reason in call["ranges"]:
        entries += [contents["trees"][number] if number >= 0 else reason[0]] * (end - begin)
    assert call["probes"] == machine.calls
    return contents, entries


def found(entry: Any) -> Any:
    """The tree of an entry, as a value."""
    if isinstance(entry, str):
        return entry
    kinds = {} if entry["adders"] == "rounded" else {tuple(p): how for p, how in entry["adders"]}
    return canonical(entry["tree"], kinds)


@pytest.mark.parametrize("number", range(budget(10_000 // BATCH)))
def test_random_trees_are_found(number: int) -> None:
    """Their adders too: how many terms, exact or aligned and at which bit."""
    ranks, adders, trees = batch(number)
    contents, entries = reveal(ranks, adders, trees)
    wrong = [
        (tree, entry)
        for tree, entry in zip(trees, entries, strict=True)
        if found(entry) != canonical_of(tree)
    ]
    assert wrong == [], f"{len(wrong)} of {len(trees)} on {ranks} ranks: {adders}"
    checked = contents["calls"][0]["verified"]
    assert checked["equal"] == checked["elements"] > 0


@pytest.mark.parametrize("adders", ADDERS, ids=lambda a: f"{a.dtype}-{a.bits}-{a.rounding}")
def test_accumulators_are_found(adders: Adders) -> None:
    """Their bits and their rounding; a chain has adders below the root, which show them."""
    random = np.random.default_rng([SEED, adders.bits])
    plain = Adders(adders.dtype, adders.bits, adders.rounding, ("rounded",))
    trees = [draw(random, 7, plain, chain=1.0) for _ in range(20)]
    _, entries = reveal(7, plain, trees)
    for entry in entries:
        assert not isinstance(entry, str), entry
        kept = {name: entry["accumulator"][name] for name in ("bits", "rounding")}
        assert kept == {"bits": adders.bits, "rounding": adders.rounding}
        assert "accumulators" not in entry or entry["accumulators"][0][0] == []
