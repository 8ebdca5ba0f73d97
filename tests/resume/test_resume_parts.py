"""How tensors are put together, how data and numbers are compared, and the words of the report."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gpusim.tools import cli
from gpusim.tools.equal.traces import Claim, Event, Slice
from gpusim.tools.resume.comparing import compare
from gpusim.tools.resume.findings import DIFFERENT, SAME
from gpusim.tools.resume.runs import Run
from gpusim.tools.resume.wholes import Whole, difference, whole_of


class Rank:
    """A rank's trace in memory."""

    def __init__(self, rank: int, events: list[tuple[Any, ...]] = (), **end: Any) -> None:
        self.rank, self.arrays, self.events = rank, [], []
        self.end = {"steps": 0, **end}
        for order, (kind, name, step, array, more) in enumerate(events):
            event = Event(
                kind, "Net", name, "", step, 0, order, str(array.dtype), array.shape, order, **more
            )
            event.rank = self
            self.arrays.append(array)
            self.events.append(event)

    def array(self, event: Event) -> np.ndarray:
        return self.arrays[event.start]


class Trace:
    def __init__(self, *ranks: Rank) -> None:
        self.by_rank, self.ranks = ranks, len(ranks)


def whole(*parts: tuple[np.ndarray, dict[str, Any]]) -> Whole:
    ranks = [Rank(n, [("weight", "w", 0, array, more)]) for n, (array, more) in enumerate(parts)]
    return whole_of({rank.rank: rank.events for rank in ranks})


def claim(placements: str, mesh: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"claim": Claim(tuple(placements.split()), mesh, shape)}


FULL = np.arange(30.0).reshape(5, 6)


def test_a_dtensor_over_one_dimension() -> None:
    more = claim("S0", [0, 1, 2], (5, 6))
    found = whole((FULL[:2], more), (FULL[2:4], more), (FULL[4:], more))
    assert found.apart is None and np.array_equal(found.array, FULL)


def test_a_dtensor_over_two_dimensions() -> None:
    more = claim("S0 S1", [[0, 1], [2, 3]], (5, 6))
    parts = [FULL[:3, :3], FULL[:3, 3:], FULL[3:, :3], FULL[3:, 3:]]
    assert np.array_equal(whole(*((part, more) for part in parts)).array, FULL)


def test_one_dimension_cut_twice() -> None:
    """The mesh's last dimension cuts what the first has cut; a strided shard is the other way."""
    rows = np.arange(8.0)
    more = claim("S0 S0", [[0, 1], [2, 3]], (8,))
    assert np.array_equal(whole(*((rows[2 * n : 2 * n + 2], more) for n in range(4))).array, rows)
    more = claim("S0/2 S0", [[0, 1], [2, 3]], (8,))
    parts = [rows[0:2], rows[4:6], rows[2:4], rows[6:8]]
    assert np.array_equal(whole(*((part, more) for part in parts)).array, rows)


def test_copies_of_a_dtensor_that_differ() -> None:
    more = claim("R S0", [[0, 1], [2, 3]], (4,))
    parts = [np.zeros(2), np.ones(2), np.zeros(2), np.full(2, 3.0)]
    found = whole(*((part, more) for part in parts))
    assert found.apart == 3


def test_flat_shards() -> None:
    flat = FULL.reshape(-1)
    one = flat[:11], {"slice": Slice(0, (5, 6))}
    two = flat[11:], {"slice": Slice(11, (5, 6))}
    assert np.array_equal(whole(one, two).array, FULL)
    assert whole(one).array is None


def test_plain_parts_fit_in_any_dimension() -> None:
    """Shards of tensor parallelism without DTensor, saved by two ranks and loaded by three."""
    two = whole((FULL[:, :3], {}), (FULL[:, 3:], {}))
    three = whole((FULL[:, :2], {}), (FULL[:, 2:4], {}), (FULL[:, 4:], {}))
    assert two.array is None and difference(two, three) is None
    other = whole((FULL[:, :2], {}), (FULL[:, :2] + 1, {}), (FULL[:, 4:], {}))
    assert difference(two, other) is not None


def test_a_copy_that_is_another_is_the_ranks() -> None:
    mine = whole((FULL, {}), (FULL, {}))
    assert difference(mine, whole((FULL, {}), (FULL, {}), (FULL + 1, {}))) == 2
    assert difference(mine, whole((FULL, {}))) is None


# ---------------------------------------------------------------- runs


def run(ranks: int, taken: list[list[list[int]]], **end: Any) -> Run:
    """A run whose steps take these samples: of each step, of each rank."""
    steps = len(taken)
    own = [
        Rank(
            rank,
            [
                ("weight", "w", step, np.full(2, float(step + end.get("first", 0))), {})
                for step in range(steps + 1)
            ],
            steps=steps,
            data=[[[0, samples[rank]]] for samples in taken],
            elements=[["same"] for _ in taken],
            ended=[True],
            **{name: value for name, value in end.items() if name != "first"},
        )
        for rank in range(ranks)
    ]
    return Run(Trace(*own))


TWO = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


def test_the_same_samples() -> None:
    mine = run(2, TWO)
    assert compare(mine, mine, run(2, TWO[1:], first=1), 1).verdict == SAME


def test_samples_taken_again() -> None:
    mine = run(2, TWO)
    pair = compare(mine, mine, run(2, TWO[:2], first=1), 1)
    assert pair.verdict == DIFFERENT and pair.first is not None
    assert pair.first.state == "data" and (pair.first.step, pair.first.rank) == (1, 0)
    assert "4 never taken (8, 9, 10, 11), 4 taken once more (0, 1, 2, 3)" in pair.first.text


def test_another_number_of_ranks_with_the_same_batches() -> None:
    four = [[[own] for own in [samples for rank in step for samples in rank]] for step in TWO]
    mine, other = run(2, TWO), run(4, four)
    assert compare(mine, other, run(4, four[1:], first=1), 1).verdict == SAME
    pair = compare(mine, other, run(4, [four[2], four[2]], first=1), 1)
    assert pair.first is not None and pair.first.state == "data"


def test_batches_that_grow_with_the_ranks() -> None:
    """Each sample counts once in an epoch; what lacks a full batch at its end may be dropped."""
    one = [[[n, n + 1]] for n in range(0, 12, 2)]
    mine, other = run(1, one), run(2, TWO)
    assert compare(mine, other, run(2, [TWO[1], [[8, 9], [10, 11]]], first=2), 2).verdict == SAME
    pair = compare(mine, other, run(2, [TWO[0], TWO[1], TWO[2]], first=2), 2)
    assert pair.first is not None and "4 taken once more (0, 1, 2, 3)" in pair.first.text
    pair = compare(mine, other, run(2, [TWO[2]], first=2), 2)
    assert pair.first is not None and "4 never taken (4, 5, 6, 7)" in pair.first.text


def test_steps_that_are_made_too_often() -> None:
    mine = run(1, [[[0]], [[1]], [[2]]])
    pair = compare(mine, mine, run(1, [[[1]], [[2]], [[3]]], first=1), 1)
    assert [each.state for each in pair.findings] == ["steps"]


def test_learning_rates() -> None:
    def groups(lr: float) -> Any:
        return [[[[{"lr": lr}], [["Net/w"]]]]] * 3

    mine = run(1, [[[0]], [[1]], [[2]]], groups=groups(0.1))
    assert (
        compare(mine, mine, run(1, [[[1]], [[2]]], first=1, groups=groups(0.1)), 1).verdict == SAME
    )
    pair = compare(mine, mine, run(1, [[[1]], [[2]]], first=1, groups=groups(0.2)), 1)
    assert pair.first is not None and pair.first.state == "groups"
    assert pair.first.text == "lr is 0.2, not 0.1"


def random(*names: str) -> Any:
    return [{"torch": name, "numpy": "", "python": ""} for name in names]


@pytest.mark.parametrize(
    ("state", "draws", "verdict"),
    [
        ("b", ["torch"], SAME),
        ("a", ["torch"], DIFFERENT),
        ("c", ["torch"], DIFFERENT),
        ("a", [], SAME),
    ],
)
def test_generators_count_if_they_are_drawn_from(
    state: str, draws: list[str], verdict: str
) -> None:
    mine = run(1, [[[0]], [[1]], [[2]]], random=random("a", "b", "c"), draws=draws)
    pair = compare(mine, mine, run(1, [[[1]], [[2]]], first=1, random=random(state)), 1)
    assert pair.verdict == verdict
    if state == "a" and draws:
        assert pair.first is not None and "the run's start" in pair.first.text


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py", "{checkpoint}"], "expected --save-ranks LIST"),
        (["--save-ranks", "2", "train.py", "out"], r"expected \{checkpoint\} in the script's"),
        (["--save-ranks", "1-9", "train.py", "{checkpoint}"], "expected at most 64"),
        (
            ["--save-ranks", "2", "--steps", "3", "--stop-after", "3", "train.py", "{checkpoint}"],
            "--steps 3: expected more than --stop-after 3",
        ),
        (["--save-ranks", "2", "missing.py", "{checkpoint}"], "missing.py: there is no such file"),
    ],
)
def test_wrong_usage(
    words: list[str], message: str, capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert cli.main(["resume", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
