"""What `gpusim reveal --show` says of a file: names, words, drawings, and what changes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusim.fallback.graphs import Adder
from gpusim.fallback.trees import SumTree, Trees
from gpusim.revealed import DTYPES, read_text, trees_of
from gpusim.tools.options import UsageError
from gpusim.tools.reveal.naming import differing, in_words, likenesses, tree_in_words
from gpusim.tools.reveal.showing import describe, drawn, lines, show
from gpusim.twins import TWINS
from tests.contract.order_files import BITS, order, random_trees, write


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"json": False, "picture": None, **given})


def file_of(contents: dict[str, Any]) -> Any:
    return read_text(json.dumps(contents))


def twin_file(name: str, ranks: int, elements: int, dtype: str = "float32", **more: Any) -> Any:
    schedule = TWINS[name].schedule
    own = schedule.hops == "own" or dtype != "bfloat16"
    trees = trees_of(schedule, ranks, elements, DTYPES[dtype])
    bits = BITS[dtype] if own else 24
    return file_of(order(trees, ranks, dtype, bits, minus_zero=not schedule.from_zero, **more))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", TWINS)
def test_a_twins_file_has_its_name(name: str, ranks: int) -> None:
    twin = TWINS[name]
    for dtype in set(twin.dtypes) & {"float32", "bfloat16"}:
        for elements in (1, 64, 1003):
            try:
                file = twin_file(name, ranks, elements, dtype)
            except ValueError:
                continue  # the engine's order is not known for so many
            found = likenesses(file, file.calls[0])
            assert name in [each.name for each in found if each.is_twin]
            assert any(name in line for line in lines(file) if "the order of" in line)
            assert name in describe(file)["calls"][0]["twins"]


def test_a_ring_is_said_in_words_and_by_its_ranges() -> None:
    said = "\n".join(lines(twin_file("gloo-ring", 4, 64)))
    for line in (
        "an engine, 4 ranks",
        "64 elements of float32, in place",
        "  4 ranges of elements, 4 trees",
        "  a ring: block b is a chain from rank b - 1 down, of 4 blocks",
        "  the order of gloo-ring",
        "  partial sums: 24 bits, nearest-even",
        "  can be replayed",
        "  elements 16 to 31: 0, 3, 2, 1 (down from 0)",
    ):
        assert f"{line}\n" in f"{said}\n"


def test_other_partial_sums_are_named() -> None:
    trees = trees_of(TWINS["gloo-ring"].schedule, 4, 64, 2)
    said = lines(file_of(order(trees, 4, "bfloat16", 24)))
    expected = "  the trees of gloo-ring, but partial sums in float32, there in bfloat16"
    assert expected in said
    said = lines(file_of(order(trees_of("linear", 4, 9, 4), 4, minus_zero=False)))
    assert "  the order of xla-cpu" in said and "  a sum of negative zeros is +0" in said
    assert any("openmpi-linear" in line for line in lines(twin_file("openmpi-linear", 4, 9)))


def test_the_nearest_twin_is_named_with_the_first_element_that_differs() -> None:
    ring = trees_of(TWINS["gloo-ring"].schedule, 4, 64, 4)
    other = SumTree.of([[0, 2], [1, 3]])
    changed = Trees.joined([(0, 16, ring.trees[0]), *ring.ranges[1:3], (48, 64, other)])
    said = lines(file_of(order(changed, 4)))
    expected = "the nearest is gloo-ring: 16 of 64 elements differ, from element 48 on"
    assert f"  none of the twins; {expected}" in said
    assert differing(changed, ring) == (16, 48) and differing(ring, ring) == (0, None)
    said = lines(file_of(order(Trees((0, 9), (0,), (other,)), 4)))
    assert "  none of the twins or orders by name has a tree in common with it" in said


def test_what_changes_is_said() -> None:
    contents = order(trees_of("ring", 4, 8, 4), 4)
    call = contents["calls"][0] | {"verified": {"elements": 16, "equal": 15}}
    contents["calls"] = [
        call,
        {**call, "in_place": False, "ranges": [[0, 8, 2]]},
        {**call, "offset": 3},
        {**call, "same": False, "bits_same": False, "ranks_agree": False, "repeats": 5},
        {**call, "elements": 9, "ranges": [[0, 8, 0], [8, 9, -1, "sums overflow"]]},
    ]
    said = lines(file_of(contents))
    for line in (
        "8 elements of float32, not in place",
        "  other trees than calls[0] of this size",
        "8 elements of float32, in place, 3 elements into the buffer",
        "  the same trees as calls[0] of this size",
        "  the trees change from run to run (5 runs); these are the first run's",
        "  the bits of the same values change from run to run",
        "  ranks have different results",
        "  of 16 sums of random values 15 have the bits of this description",
        "  elements 8 to 8: no tree explains them: sums overflow",
    ):
        assert line in said
    assert sum(line.startswith("  cannot be replayed: ") for line in said) == 2


def test_trees_are_drawn_and_written_in_a_line() -> None:
    tree = SumTree.of([[0, 3], [1, 2, 4]], {(1,): Adder("aligned", 24)})
    assert tree_in_words(tree) == "(0 + 3) + (aligned to 24 bits: 1 + 2 + 4)"
    assert drawn(tree) == [
        *("+", "├─ +", "│  ├─ 0", "│  └─ 3", "└─ + aligned to 24 bits", "   ├─ 1", "   ├─ 2"),
        "   └─ 4",
    ]
    assert tree_in_words(SumTree.of([0, 1])) == "0 + 1" and tree_in_words(SumTree((0,))) == "0"
    assert tree_in_words(SumTree.of([[[2, 0], 1], 3])) == "0, 2, 1, 3 (a chain)"
    assert tree_in_words(SumTree.of([[[2, 1], 3], 0])) == "1, 2, 3, 0 (up from 1)"


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("ring", 4, "a ring: block b is a chain from rank b up, of one block for each rank"),
        ("exact", 4, "the exact sum of all ranks, rounded once"),
        ("linear", 4, "one chain for all elements: 0, 1, 2, 3 (up from 0)"),
        ("reverse", 4, "one chain for all elements: 3, 2, 1, 0 (down from 3)"),
        ("tree", 8, "one tree for all elements: neighbours in pairs, level by level"),
        ("nccl-ring", 4, "a ring: block b is a chain from rank b + 1 up, of 4 blocks"),
        ("mpich", 5, "one tree for all elements"),
    ],
)
def test_orders_have_words(name: str, ranks: int, expected: str) -> None:
    schedule = TWINS[name].schedule if name in TWINS else name
    assert in_words(trees_of(schedule, ranks, 64, 4), ranks) == expected


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees = random_trees(np.random.default_rng(2), 6, 40)
    path = write(tmp_path / "order.json", order(trees, 6))
    assert show(path, options(json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world_size"] == 6 and len(found["trees"]) == len(trees.trees)
    (call,) = found["calls"]
    assert call["replays"] and call["problem"] is None and not call["twins"]
    assert [end for _, end, _ in call["ranges"]] == list(trees.edges[1:])
    assert call["nearest"]["differing"] == 40


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures_are_written(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trees = random_trees(np.random.default_rng(3), 9, 400, widest=4, kinds=12)
    path = write(tmp_path / "order.json", order(trees, 9) | {"engine": "a < b & c"})
    picture = tmp_path / f"order.{suffix}"
    assert show(path, options(picture=picture)) == 0
    assert picture.stat().st_size > 1000
    assert f"written to {picture}" in capsys.readouterr().out
    before = picture.read_bytes()
    show(path, options(picture=picture))
    assert picture.read_bytes() == before


def test_files_of_one_rank_and_of_many_ranges_are_shown() -> None:
    alone = file_of(order(trees_of("linear", 1, 5, 4), 1))
    assert "  can be replayed" in lines(alone) or len(lines(alone)) > 2
    many = random_trees(np.random.default_rng(5), 40, 3000, kinds=30)
    assert len(lines(file_of(order(many, 40)))) < 40


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", r"--show .*order.json: format: missing"), ("[", r"--show .*line 1, column 2")],
)
def test_a_broken_file_is_wrong_use(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        show(tmp_path / "order.json", options())
    with pytest.raises(UsageError, match=r"--show .*none.json: No such file"):
        show(tmp_path / "none.json", options())
