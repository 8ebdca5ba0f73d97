"""Files of revealed orders are read, and what is wrong in one is named by its place."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusim import Reduction, collectives
from gpusim.bounded_json import parse
from gpusim.revealed import LIMITS, read, read_text, trees_of
from gpusim.twins import TWINS
from tests.contract.kernel_sets import runs_every_set
from tests.contract.order_files import entry, order, random_tree, random_trees, values
from tests.oracles.budget import budget

GLOO = trees_of(TWINS["gloo-ring"].schedule, 4, 64, 4)


def changed(path: str, value: Any) -> str:
    """The file of gloo's ring, with another value at a place; None: without it."""
    contents = order(GLOO, 4)
    contents["trees"][0]["accumulators"] = []
    at: Any = contents
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in keys:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(contents)


@runs_every_set
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", "format: 'other': expected 'gpusim order'"),
        ("format", None, "format: missing"),
        ("version", 2, "version: 2: expected 1; a newer gpusim may read it"),
        ("world_size", 0, "world_size: 0: expected an integer from 1 to 1,024"),
        ("world_size", True, "world_size: True: expected an integer"),
        ("world_size", 4.0, "world_size: 4.0: expected an integer"),
        ("world_size", 5, r"trees\[0\].tree: rank 4 is missing, of 5 ranks"),
        ("world_size", 3, r"trees\[0\].tree.*: 3: expected an integer from 0 to 2"),
        ("dtype", "int32", "dtype: 'int32': expected one of .*bfloat16"),
        ("op", "max", "op: 'max': expected 'sum'"),
        ("calls", [], r"calls: \[\]: expected at least one call"),
        ("calls", {}, "calls: an object: expected a list"),
        ("calls.0", 3, r"calls\[0\]: 3: expected an object"),
        ("calls.0.elements", 65, r"calls\[0\].ranges: the last one ends at 64: expected elements"),
        ("calls.0.elements", 40, r"calls\[0\].ranges\[2\]\[1\]: 48: expected an integer from 0 to"),
        ("calls.0.ranges.1.0", 15, r"ranges\[1\]: elements 15 to 32: expected a range that begins"),
        ("calls.0.ranges.1.0", 17, r"ranges\[1\]: elements 17 to 32: expected a range that begins"),
        ("calls.0.ranges.1.1", 16, r"ranges\[1\]: elements 16 to 16: expected a range"),
        ("calls.0.ranges.1.2", 4, r"ranges\[1\]\[2\]: 4: expected an integer from -1 to 3"),
        ("calls.0.ranges.1", [16], r"calls\[0\].ranges\[1\]: a list of 1: expected \[begin, end"),
        ("calls.0.same", 1, r"calls\[0\].same: 1: expected true or false"),
        ("calls.0.dtype", "x", r"calls\[0\].dtype: 'x': expected one of"),
        ("calls.0.offset", -1, r"calls\[0\].offset: -1: expected an integer from 0"),
        ("calls.0.verified", {}, r"calls\[0\].verified.equal: missing"),
        ("trees.0.tree", [[0, 1], [2, 2]], r"trees\[0\].tree\[1\]\[1\]: rank 2 is there twice"),
        ("trees.0.tree", [[0, 1], 2], r"trees\[0\].tree: rank 3 is missing, of 4 ranks"),
        ("trees.0.tree", [[0, 1, 2, 3]], r"trees\[0\].tree: 1 terms: expected 2 to 4"),
        ("trees.0.tree", [], r"trees\[0\].tree: 0 terms: expected 2 to 4"),
        ("trees.0.tree", [[0, 1], [2, "3"]], r"tree\[1\]\[1\]: '3': expected an integer from 0"),
        ("trees.0.tree", "0", r"trees\[0\].tree: '0': expected an integer"),
        ("trees.0.tree", None, r"trees\[0\].tree: missing"),
        ("trees.0.adders", "fused", r"trees\[0\].adders: 'fused': expected one of rounded"),
        ("trees.0.adders", [[[5], {}]], r"adders\[0\]\[0\]: a list of 1: expected the path of a"),
        ("trees.0.adders", [[[]]], r"adders\[0\]: a list of 1: expected \[path of a node"),
        ("trees.0.adders", [[[], {}]], r"adders\[0\]\[1\].kind: missing"),
        ("trees.0.adders", [[[], {"kind": "exact"}]] * 2, "the node is there twice"),
        ("trees.0.adders", [[[], {"kind": "aligned", "bits": 1}]], "bits: 1: expected an integer"),
        ("trees.0.accumulator", {"bits": 0}, r"accumulator.bits: 0: expected an integer from 1"),
        ("trees.0.accumulator", {"rounding": "odd"}, "accumulator.rounding: 'odd': expected one"),
        ("trees.0.accumulator", 3, r"trees\[0\].accumulator: 3: expected an object"),
        ("trees.0.minus_zero", 0, r"trees\[0\].minus_zero: 0: expected true or false"),
        ("engine", 3, "engine: 3: expected a string"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_text(changed(path, value))


@runs_every_set
def test_unknown_keys_are_left_alone() -> None:
    contents = order(GLOO, 4) | {"later": [1, {"x": None}]}
    contents["calls"][0]["probes_of_later"] = 3
    assert read_text(json.dumps(contents)).world_size == 4


@runs_every_set
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: the end: expected JSON"),
        ("{", "line 1, column 2: the end: expected JSON"),
        ('{"a": NaN}', "column 7: 'NaN}': expected JSON"),
        ('{"a": -Infinity}', "'-Infinity}': expected JSON"),
        ('{"a": 1e999}', "1e999: expected a finite number"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("[" * 2000, "column 1049: nested deeper than 1048"),
        ('{"a": ' * 2000, "nested deeper than 1048"),
        ("1" * 5000, "a number of more than 40 characters"),
        ("{}x", "line 1, column 3: 'x': expected the end"),
        ("[1,]", "column 4: ']': expected a value"),
        ("[]", "the file: a list of 0: expected an object"),
        ("{}", "format: missing"),
    ],
)
def test_broken_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_text(text)


def test_deep_trees_are_read_without_recursion(tmp_path: Path) -> None:
    ranks = LIMITS["world_size"]
    tree: Any = 0
    for rank in range(1, ranks):
        tree = [tree, rank] if rank % 2 else [rank, tree]
    text = json.dumps({**order(GLOO, 4), "world_size": ranks, "trees": []})
    nested = "0"
    for rank in range(1, ranks):
        nested = f"[{nested}, {rank}]"
    trees = f'[{{"tree": {nested}, "accumulator": {{"bits": 24, "rounding": "nearest-even"}}}}]'
    text = text.replace('"trees": []', f'"trees": {trees}')
    text = text.replace(json.dumps(order(GLOO, 4)["calls"][0]["ranges"]), "[[0, 64, 0]]")
    (tmp_path / "order.json").write_text(text)
    chosen = Reduction.like(tmp_path / "order.json")
    x = values(ranks, 64, np.float32)
    expected = collectives.psum(x, reduction="linear").value
    assert collectives.psum(x, reduction=chosen).value.tobytes() == expected.tobytes()


@runs_every_set
def test_what_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    path.write_bytes(b"\xff{}")
    with pytest.raises(ValueError, match=r"order.json: byte 0: expected UTF-8"):
        read(path)
    with path.open("wb") as file:
        file.truncate(LIMITS["bytes"] + 1)
    with pytest.raises(ValueError, match=r"expected at most 67,108,864 bytes"):
        read(path)


def broken(draw: Any) -> str:
    """A file with something wrong: a character, a value, a key, a part that is there twice."""
    random = np.random.default_rng(draw(st.integers(0, 2**30)))
    ranks = int(random.integers(1, 7))
    contents = order(random_trees(random, ranks, 12), ranks)
    contents["trees"].append(entry(random_tree(random, ranks, 4), 24, adders=[[[], "unknown"]]))
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [contents]
    while waiting:
        node = waiting.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], list | dict):
                waiting.append(node[key])
    odd = [None, True, -1, 0, 7, 1 << 70, 0.5, "", "x", [], {}, [[0, 1], 1], {"kind": "exact"}]
    for _ in range(int(random.integers(0, 4))):
        node, key = places[int(random.integers(len(places)))]
        if isinstance(node, list) and key >= len(node):
            continue
        change = int(random.integers(4))
        if change == 0 and isinstance(node, dict):
            node.pop(key, None)
        elif change == 1 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        else:
            node[key] = copy.deepcopy(odd[int(random.integers(len(odd)))])
    text = json.dumps(contents)
    for _ in range(int(random.integers(0, 3))):
        at = int(random.integers(len(text)))
        new = ["", "[", "]", "{", "}", ",", ":", '"', "-", "9", "NaN", "\x00", "\\"]
        text = (
            text[:at] + new[int(random.integers(len(new)))] + text[at + int(random.integers(3)) :]
        )
    return text


@runs_every_set
@settings(
    max_examples=budget(10_000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_broken_files_are_refused_with_a_ValueError_and_little_memory(data: st.DataObject) -> None:
    text = broken(data.draw)
    tracemalloc.start()
    try:
        file = read_text(text)
    except ValueError as error:
        assert str(error) and len(str(error)) < 1000
    else:
        assert file.calls and 1 <= file.world_size <= LIMITS["world_size"]
        for call in file.calls:
            assert sum(end - begin for begin, end, _ in call.ranges) <= call.elements
        for tree in file.trees:
            assert tree.tree.members == file.world_size
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4_000_000


@runs_every_set
@settings(max_examples=budget(3000), deadline=None)
@given(st.text('[]{},:"\\ntrufalse0123456789.-+eE \n\t', max_size=40))
def test_json_is_what_pythons_json_is(text: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        expected = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except ValueError:
        expected = ValueError
    try:
        found = parse(text)
    except ValueError as error:
        if "finite" in str(error) or "characters" in str(error):
            return  # which Python's takes
        found = ValueError
    assert found == expected or (isinstance(found, float) and math.isnan(found))
