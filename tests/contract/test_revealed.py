"""Files of revealed orders: what is wrong in one is named by its place, and like() has the bits."""

from __future__ import annotations

import copy
import json
import math
import pickle
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Reduction, as_reduction, collectives, lax
from gpusim.bounded_json import parse
from gpusim.fallback import fold, kernels
from gpusim.fallback.schedules import Case, Schedule, Trees
from gpusim.fallback.trees import SumTree
from gpusim.fallback.wide import ROUNDINGS
from gpusim.revealed import LIMITS, read, read_text, trees_of
from gpusim.tools.reveal import reveal_order
from gpusim.twins import TWINS
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.order_files import (
    BITS,
    entry,
    nodes_of,
    order,
    random_tree,
    random_trees,
    write,
)
from tests.cuda.host_cuda.device import HostDevice
from tests.oracles.budget import budget

DEVICE = HostDevice()
GLOO = trees_of(TWINS["gloo-ring"].schedule, 4, 64, 4)


@pytest.fixture
def gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of gloo's ring, 64 elements on 4 ranks, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "order.json", order(GLOO, 4))
    return "order.json"


def values(ranks: int, elements: int, dtype: Any, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    scales = 2.0 ** random.integers(-9, 9, size=(ranks, elements))
    return (random.normal(size=(ranks, elements)) * scales).astype(dtype)


# The bits


@runs_every_set
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", TWINS)
def test_the_file_of_a_twin_has_its_bits(name: str, ranks: int, tmp_path: Path) -> None:
    twin = TWINS[name]
    for dtype in set(twin.dtypes) & set(BITS):
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        own = twin.schedule.hops == "own" or kind.itemsize > 2
        for elements in (1, 5, 64, 1003):
            try:
                trees = trees_of(twin.schedule, ranks, elements, kind.itemsize)
            except ValueError:
                continue  # the engine's order is not known for so many
            bits = BITS[dtype] if own or dtype == "float16" else 24
            contents = order(trees, ranks, dtype, bits, minus_zero=not twin.schedule.from_zero)
            again = Reduction.like(write(tmp_path / "order.json", contents))
            x = values(ranks, elements, kind)
            x[:, 0] = -0.0
            for rounding in ("nearest", "stochastic"):
                how: dict[str, Any] = {"rounding": rounding, "seed": 5, "call": 3}
                expected = fold(x, order=twin.schedule, **how)
                found = on_every_set(partial(fold, x, order=again.schedule, **how))
                assert found.tobytes() == expected.tobytes(), (dtype, elements, rounding)
                on_gpu = DEVICE.fold(x, order=again.schedule, **how)
                assert np.asarray(on_gpu).tobytes() == expected.tobytes()


@settings(
    max_examples=budget(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 2**30), st.integers(2, 12), st.integers(1, 60), st.sampled_from([*BITS]))
def test_random_trees_have_the_bits_of_their_additions(
    tmp_path: Path, seed: int, ranks: int, elements: int, dtype: str
) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, ranks, elements)
    chosen = Reduction.like(write(tmp_path / f"{seed}.json", order(trees, ranks, dtype)))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = values(ranks, elements, kind, seed)
    found = collectives.psum(x, reduction=chosen).value
    for begin, end, tree in trees.ranges:
        # One addition of such numbers, which NumPy rounds once: float32's sums of halves are exact
        # enough that a second rounding gives the same bits.
        total = tree.folded(
            lambda m, a=begin, b=end: x[m, a:b], lambda terms, _: terms[0] + terms[1]
        )
        assert found[begin:end].tobytes() == np.asarray(total).tobytes()
    (tmp_path / f"{seed}.json").unlink()


def test_every_executor_takes_a_file(gloo: str) -> None:
    x, ring = values(4, 64, np.float32), Reduction.like("gloo-ring")
    chosen = Reduction.like(gloo)
    for call in (
        lambda r: collectives.psum(x, reduction=r).value,
        lambda r: collectives.pmean(x, reduction=r).value,
        lambda r: collectives.psum_scatter(x, reduction=r, tiled=True).value,
        lambda r: (
            collectives.psum(
                np.tile(x, (2, 1)), groups=[[*range(4)], [*range(4, 8)]], reduction=r
            ).value
        ),
        lambda r: gpusim.vmap(lambda v: lax.psum(v, "i", reduction=r), axis_name="i")(x),
        lambda r: gpusim.pmap(lambda v: lax.psum(v, "i", reduction=r), axis_name="i")(x),
    ):
        assert np.asarray(call(chosen)).tobytes() == np.asarray(call(ring)).tobytes()
    with gpusim.reduction(gloo):
        inside = collectives.psum(x).value
    assert inside.tobytes() == collectives.psum(x, reduction=ring).value.tobytes()


def test_levels_take_a_file_in_each_level(gloo: str) -> None:
    x = values(8, 64, np.float32)
    for text in ("{} groups_of=4 across tree", "linear groups_of=2 across {}"):
        one = collectives.psum(x, reduction=text.format(gloo)).value
        other = collectives.psum(x, reduction=text.format("gloo-ring")).value
        if text.startswith("{}"):  # a ring's blocks are values of their own across, here it is one
            assert one.tobytes() == other.tobytes()
        assert one.shape == other.shape


def test_what_has_the_same_bits_in_every_order_takes_any_size(gloo: str) -> None:
    chosen = as_reduction(gloo)
    numbers = np.arange(12).reshape(4, 3)
    assert collectives.psum(numbers, reduction=chosen).value.tolist() == [18, 22, 26]
    largest = as_reduction(f"{gloo} op=max")
    x = values(4, 7, np.float64)
    assert collectives.all_reduce(x, reduction=largest).value.tobytes() == x.max(0).tobytes()
    lone = x[:1].astype(np.float32)
    assert collectives.psum(lone, reduction=chosen).value.tobytes() == lone[0].tobytes()
    assert collectives.psum(np.ones((4, 0), np.float32), reduction=chosen).value.shape == (0,)


def test_accumulators_are_the_files(tmp_path: Path) -> None:
    x = np.ones((300, 3), ml_dtypes.bfloat16)
    chain = trees_of("linear", 300, 3, 2)
    for bits, total in ((8, 256), (11, 300), (24, 300), (53, 300)):
        path = write(tmp_path / "order.json", order(chain, 300, "bfloat16", bits))
        chosen = Reduction.like(path)
        assert collectives.psum(x, reduction=chosen).value.tolist() == [total] * 3
    small = np.ones((40, 3), ml_dtypes.float8_e4m3fn)
    contents = order(trees_of("linear", 40, 3, 1), 40, "float8_e4m3fn", 4)
    chosen = Reduction.like(write(path, contents))
    assert collectives.psum(small, reduction=chosen).value.tolist() == [16] * 3
    contents = order(chain, 300, "bfloat16", 7)
    with pytest.raises(ValueError, match=r"an accumulator of 7 bits: expected 8, 11, 24 or 53"):
        collectives.psum(x, reduction=Reduction.like(write(path, contents)))
    contents = order(chain, 300, "bfloat16")
    contents["trees"][0]["accumulator"] = {"bits": None}  # no rounding was seen
    chosen = Reduction.like(write(path, contents))
    assert collectives.psum(x, reduction=chosen).value.tolist() == [300] * 3


def test_one_adder_of_all_ranks_is_the_exact_order(tmp_path: Path) -> None:
    trees = Trees((0, 9), (0,), (SumTree.of([*range(5)]),))
    chosen = Reduction.like(write(tmp_path / "order.json", order(trees, 5)))
    x = values(5, 9, np.float32)
    expected = collectives.psum(x, reduction="exact").value
    assert collectives.psum(x, reduction=chosen).value.tobytes() == expected.tobytes()


@settings(max_examples=budget(400), deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(2, 16),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([*ROUNDINGS]),
    st.booleans(),
)
def test_replays_are_what_reveals_own_arithmetic_gives(
    seed: int, ranks: int, dtype: str, rounding: str, own: bool
) -> None:
    """Of its script, which shares no code with the kernels: wide adders, and all roundings."""
    random = np.random.default_rng(seed)
    nested = random_tree(random, ranks, int(random.integers(2, 9)))
    adders = []
    for path, node in nodes_of(nested):
        if len(node) > 2 or random.random() < 0.2:
            aligned = {"kind": "aligned", "bits": int(random.integers(4, 27))}
            kind = {"kind": "exact"} if random.random() < 0.5 else aligned
            adders.append([[*path], {**kind, "rounding": str(random.choice([*ROUNDINGS]))}])
    bits = BITS[dtype] if own else 24
    last = rounding if bits == BITS[dtype] else "nearest-even"
    tree = {
        "tree": nested,
        "adders": adders or "rounded",
        "accumulator": {"bits": bits, "rounding": rounding},
        "result": {"bits": BITS[dtype], "rounding": last},
    }
    contents = order(Trees((0, 9), (0,), (SumTree.of(nested),)), ranks, dtype)
    x = values(ranks, 9, np.dtype(getattr(ml_dtypes, dtype, dtype)), seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "order.json", contents | {"trees": [tree]})
        found = collectives.psum(x, reduction=Reduction.like(path)).value
    expected = reveal_order.simulate(tree, x.astype(np.float64))
    assert found.astype(np.float64).tolist() == expected.tolist()


# Texts


def test_the_text_is_the_files_name(gloo: str) -> None:
    chosen = Reduction.like(gloo)
    assert str(chosen) == gloo and as_reduction(str(chosen)) == chosen
    assert as_reduction(Path(gloo)) == chosen == Reduction(order=gloo)
    text = f"{gloo} accumulate=float64 rounding=stochastic seed=3"
    assert str(as_reduction(text)) == text
    assert as_reduction({"order": gloo, "seed": 1}).seed == 1
    levels = f"{gloo} groups_of=4 across {gloo}"
    assert str(as_reduction(levels)) == levels
    assert pickle.loads(pickle.dumps(chosen)) == chosen and copy.deepcopy(chosen) == chosen
    assert len(repr(chosen)) < 120 and hash(chosen) == hash(as_reduction(gloo))


def test_a_file_that_changes_is_read_again(gloo: str) -> None:
    before = as_reduction(gloo)
    write(Path(gloo), order(trees_of("linear", 4, 65, 4), 4))
    after = as_reduction(gloo)
    assert before != after
    assert collectives.psum(values(4, 65, np.float32), reduction=after).value.shape == (65,)


def test_what_a_file_lacks_is_refused_with_what_it_has(gloo: str) -> None:
    chosen = as_reduction(gloo)
    known = r"order.json knows sums of 4 ranks: float32 of 64 elements; gpusim reveal --write"
    with pytest.raises(ValueError, match=rf"^63 elements: {known}"):
        collectives.psum(np.ones((4, 63), np.float32), reduction=chosen)
    with pytest.raises(ValueError, match=r"^5 members: order.json was revealed with 4 ranks"):
        collectives.psum(np.ones((5, 64), np.float32), reduction=chosen)
    with pytest.raises(TypeError, match=rf"^float16 members: {known}"):
        collectives.psum(np.ones((4, 64), np.float16), reduction=chosen)
    with pytest.raises(ValueError, match=r"op='prod': order.json has the order of sums"):
        collectives.all_reduce(np.ones((4, 64), np.float32), reduction=f"{gloo} op=prod")
    for text, message in (
        (f"{gloo} wire=bfloat16", "expected no wire, as trees say what is added"),
        (f"{gloo} divide=members", "expected 'result', as the trees are those of sums"),
        (f"{gloo} chunk=4", "order.json lacks it; nccl-ring has it"),
        ("none.json", "No such file"),
        (".", "or a file .order.json."),
    ):
        with pytest.raises(ValueError, match=message):
            as_reduction(text)
    for name in ("a file.json", "a=b.json"):
        with pytest.raises(ValueError, match="expected a file's name without blanks and '='"):
            Reduction.like(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adders": [[[], "unknown"]]}, "an adder of 3 terms adds in a way that was not found"),
        ({"adders": "unknown"}, "an adder of 3 terms adds"),
        ({"adders": "rounded"}, "an adder of 3 terms adds"),
        (
            {"adders": [[[], {"kind": "aligned", "bits": 24, "rounding": "unknown"}]]},
            "an adder of 3",
        ),
        ({"accumulator": {"bits": 53, "rounding": "up"}}, "53 bits, up: expected 8, 11 or 24"),
        ({"accumulator": {"bits": 24, "rounding": "unknown"}}, "rounding 'unknown'"),
        ({"accumulator": {"bits": 24, "rounding": "stochastic"}}, "rounding 'stochastic'"),
        ({"accumulators": [[[], {"bits": 8, "rounding": "nearest-even"}]]}, "and some 8 bits"),
        ({"accumulators": [[[], {"bits": 24, "rounding": "up"}]]}, "nearest-even, and some up"),
        ({"result": {"bits": 11, "rounding": "nearest-even"}}, "result: 11 bits: expected 24"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    contents = order(Trees((0, 4), (0,), (SumTree.of([0, 1, 2]),)), 3)
    contents["trees"][0] |= changes
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    with pytest.raises(ValueError, match=rf"4 elements of float32: trees\[0\]: .*{message}"):
        collectives.psum(np.ones((3, 4), np.float32), reduction=chosen)


def test_calls_that_cannot_be_replayed_say_why(tmp_path: Path) -> None:
    contents = order(GLOO, 4)
    contents["calls"][0] |= {"ranges": [[0, 60, 0], [60, 64, -1, "results overflow"]]}
    contents["calls"].append({"elements": 5, "ranges": [[0, 5, 1]], "same": False})
    contents["calls"].append({"elements": 5, "ranges": [[0, 5, 2]]})
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    message = "4 elements, from 60 on, have results that no tree explains: results overflow"
    with pytest.raises(ValueError, match=message):
        collectives.psum(np.ones((4, 64), np.float32), reduction=chosen)
    with pytest.raises(ValueError, match="the trees change from run to run"):
        collectives.psum(np.ones((4, 5), np.float32), reduction=chosen)
    del contents["calls"][1]
    contents["trees"][0]["accumulator"]["bits"] = 53
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    with pytest.raises(ValueError, match=r"trees with accumulators of 24 bits.*, 53 bits"):
        collectives.psum(np.ones((4, 5), np.float32), reduction=chosen)
    contents["trees"][0] |= {"accumulator": contents["trees"][1]["accumulator"]}
    contents["trees"][0] |= {"minus_zero": False}
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    with pytest.raises(ValueError, match="sums of negative zeros are -0 by some trees and"):
        collectives.psum(np.ones((4, 5), np.float32), reduction=chosen)


# Reading


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


# Refused by kernels


@runs_every_set
def test_trees_by_ranges_are_orders_of_the_kernels(gloo: str) -> None:
    del gloo
    random = np.random.default_rng(4)
    order_of = Schedule((Case(random_trees(random, 6, 90)),))
    x = values(6, 90, np.float32)
    with kernels.chosen("numpy"):
        expected = fold(x, order=order_of)
    assert np.asarray(DEVICE.fold(x, order=order_of)).tobytes() == expected.tobytes()
