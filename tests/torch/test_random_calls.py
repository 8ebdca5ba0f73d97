"""Random calls give what gloo's processes give: the same bytes, or an exception in both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpusim.torch.distributed import launch
from tests.oracles.budget import SEED, budget
from tests.torch.children import needs_linux
from tests.torch.gloo_ranks import gloo
from tests.torch.random_calls import EXCLUDED, FAILED, described, outcome, random_calls

pytestmark = [needs_linux, pytest.mark.usefixtures("memory_is_returned")]

BATCH = 50
SIZES = (2, 3, 5, 1)


def batches() -> list[tuple[int, int]]:
    """The first seed and the number of ranks of each batch: 3,000 calls in a full run."""
    count = budget(3000, least=100, most=100) // BATCH
    first = SEED % 1_000_000 * 10_000
    return [(first + number * BATCH, SIZES[number % len(SIZES)]) for number in range(count)]


#: Seeds of calls that once differed, and their numbers of ranks.
FOUND = [(8983011386, 1)]


def check(seeds: list[int], size: int, folder: Path, processes: bool) -> int:
    """Compare the calls of some seeds; how many of them raise in both."""
    folder.mkdir()
    expected = gloo([("random_calls", size, {"seeds": seeds})], folder)[0]
    options = {"reduction": "gloo-ring", "processes": processes}
    found = launch(lambda rank: random_calls(seeds), size, **options)
    for seed in map(str, seeds):
        for rank in range(size):
            theirs, mine = expected[rank][seed], found[rank][seed]
            assert torch.equal(theirs, mine), (rank, described(int(seed), size))
    return sum(torch.equal(expected[0][str(seed)], FAILED) for seed in seeds)


def test_calls_that_once_differed(tmp_path: Path) -> None:
    for seed, size in FOUND:
        check([seed], size, tmp_path / str(seed), processes=False)


def test_calls_are_those_of_gloo(tmp_path: Path) -> None:
    """In turns, and every third batch in processes. A fifth of the calls, at least, raise."""
    failed = [
        check([*range(first, first + BATCH)], size, tmp_path / str(first), number % 3 == 1)
        for number, (first, size) in enumerate(batches())
    ]
    assert 0.1 < sum(failed) / (BATCH * len(failed)) < 0.6


def test_calls_that_are_not_compared_have_a_reason() -> None:
    """The table is short, and each entry is used."""
    source = Path(random_calls.__code__.co_filename).read_text()
    for name in EXCLUDED:
        assert f'exclude("{name}"' in source, name
    assert len(EXCLUDED) < 8


def test_calls_that_are_made_again() -> None:
    """A process says a call in full once, and then by a plan: it gives the same."""
    first, size = SEED % 1_000_000 * 10_000 + 5_000, 3
    seeds = list(range(first, first + budget(400, least=30, most=30)))

    def program(rank: int) -> list[list[torch.Tensor]]:
        random_calls(seeds[:1])
        return [[outcome(seed, rank, size) for _ in range(3)] for seed in seeds]

    threads, processes = (
        launch(program, size, reduction="gloo-ring", processes=each) for each in (False, True)
    )
    for rank in range(size):
        for seed, one, others in zip(seeds, threads[rank], processes[rank], strict=True):
            for other in others:
                assert torch.equal(one[0], other), (rank, described(seed, size))
